"""The base classes of a step's operations; the operations and the step are in ``operations``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

from kvplane.slices import Slices
from kvplane.wire import columns
from kvplane.wire.columns import INT64
from kvplane.wire.v1 import session_pb2 as cpb

_ID_BYTES: Final = 8

Failure = tuple[int, int, int, int, int]
"""A refused item: its index, a code, and three numbers that depend on the code."""
Failures = list[Failure] | None
"""The refused items of an operation; None if there are none."""


class Refusable:
    """Base class that says how errors name the items of one kind of request."""

    name = ""
    is_one_item = False
    """Says whether it succeeds or fails as a whole; otherwise each sequence is an item."""
    noun = "sequence"
    """Says in errors what the ids belong to."""
    id_field = "sequence_ids"
    """Name of the field that holds the ids of the sequences."""
    parent_field = "sequence_ids"
    """Name of the field that holds the ids of sequences that have to be live."""
    names_each_once = False
    """Says whether an id that occurs twice is refused as such."""
    computes = False
    """Says whether the plan computes tokens of sequences that were live before it."""

    def located(self, field: str, failure: Failure) -> tuple[str, int | None]:
        """Return the column at fault in an item, and the index in it. ``field``: its error's."""
        if self.is_one_item and not field.endswith("_ids"):
            return field, None
        return field, failure[0]


class Operation(Refusable, ABC):
    """Base class of one kind of operation, such as an append: how it is counted and run."""

    is_checked_with_answer = False
    """Says whether a check returns the answer that running it would give, besides failures."""

    def may_plan(self, message: Any) -> bool:
        """Return whether the operation may need a plan."""
        return True

    def num_items(self, message: Any) -> int:
        """Return how many items the operation's answer has."""
        return 1 if self.is_one_item else columns.count(INT64, getattr(message, self.id_field))

    def num_changes(self, message: Any) -> int:
        """Return how many sequences it changes, at least 1, for a step's limit. Reads no column."""
        return max(1, len(getattr(message, self.id_field)) // _ID_BYTES)

    @abstractmethod
    def run(self, step: Any, message: Any, result: cpb.OperationResult) -> Slices[Failures]:
        """Do the items that can be done, in slices; returns those that were refused. Raises
        KvplaneError or ColumnError when none can be done.
        """


class OneSlice(Operation):
    """Base class of an operation that runs in one slice."""

    def run(self, step: Any, message: Any, result: cpb.OperationResult) -> Slices[Failures]:
        yield from ()
        return self.do(step, message, result)

    @abstractmethod
    def do(self, step: Any, message: Any, result: cpb.OperationResult) -> Failures:
        """Run the operation at once, as ``run`` does in slices."""


Named = tuple[Operation, Any]
"""An operation's kind and its message."""
