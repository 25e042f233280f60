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
"""Item, code, and three numbers that depend on the code; see ``kvplane_blocks._native``."""
Failures = list[Failure] | None
"""The items that were refused; None for none."""


class Refusable:
    """Says how the items of a kind of request are named in the errors that refuse them."""

    name = ""
    is_one_item = False
    """It succeeds or fails as a whole; otherwise each sequence that it names is an item."""
    id_field = "sequence_ids"
    """The field that names its sequences."""
    parent_field = "sequence_ids"
    """The field that names the sequences that have to be live."""
    names_each_once = False
    """An id that it names twice is refused as such."""
    computes = False
    """The plan computes tokens of sequences that were live before it."""

    def located(self, field: str, failure: Failure) -> tuple[str, int | None]:
        """Return the column at fault in an item, and the index in it. ``field``: its error's."""
        if self.is_one_item and not field.endswith("_ids"):
            return field, None
        return field, failure[0]


class Operation(Refusable, ABC):
    """One kind of operation."""

    is_checked_with_answer = False
    """A check of it returns, besides any failures, the answer that running it would give."""

    def may_plan(self, message: Any) -> bool:
        """Return whether it may need a plan."""
        return True

    def num_items(self, message: Any) -> int:
        """Count the items of its answer."""
        return 1 if self.is_one_item else columns.count(INT64, message.sequence_ids)

    def num_changes(self, message: Any) -> int:
        """Count the sequences that it changes, at least 1, for a step's limit. Reads no column."""
        return max(1, len(message.sequence_ids) // _ID_BYTES)

    @abstractmethod
    def run(self, step: Any, message: Any, result: cpb.OperationResult) -> Slices[Failures]:
        """Do the items that can be done. Raises KvplaneError or ColumnError when none can."""


class OneSlice(Operation):
    """An operation that runs in one slice."""

    def run(self, step: Any, message: Any, result: cpb.OperationResult) -> Slices[Failures]:
        yield from ()
        return self.do(step, message, result)

    @abstractmethod
    def do(self, step: Any, message: Any, result: cpb.OperationResult) -> Failures:
        """Do what ``run`` does, at once."""


Named = tuple[Operation, Any]
"""An operation and its message."""
