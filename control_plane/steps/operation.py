"""What every operation of a step has; those there are, and the step, are in ``operations``."""

from __future__ import annotations

from typing import Any, Final

from kvplane.slices import Slices
from kvplane.v1 import control_pb2 as cpb
from kvplane.wire import columns
from kvplane.wire.columns import INT64

_ID_BYTES: Final = 8

Failure = tuple[int, int, int, int, int]
"""Item, code, and what the code gives a sense to; see ``kvplane_blocks._native``."""
Failures = list[Failure] | None
"""The items that were refused; None for none."""


class Operation:
    """One kind of operation."""

    name = ""
    is_one_item = False
    """Whether it succeeds or fails as a whole; else each sequence that it names is an item."""
    id_field = "sequence_ids"
    """The field that names its sequences."""
    parent_field = "sequence_ids"
    """The field that names the sequences that have to be live."""
    names_each_once = False
    """Whether an id that it names twice is refused as such."""
    computes = False
    """Whether it has tokens computed of sequences that were live before."""
    is_checked_with_answer = False
    """Whether a check of it says what it would be answered, beside whether it could be done."""

    def may_plan(self, message: Any) -> bool:
        """Whether it may need a plan."""
        return True

    def num_items(self, message: Any) -> int:
        """Items that it is answered by."""
        return 1 if self.is_one_item else columns.count(INT64, message.sequence_ids)

    def num_changes(self, message: Any) -> int:
        """Sequences that it changes, at least 1: what a step's limit counts. Reads nothing."""
        return max(1, len(message.sequence_ids) // _ID_BYTES)

    def located(self, field: str, failure: Failure) -> tuple[str, int | None]:
        """The column of what is wrong with an item, and the index in it. ``field``: its error's."""
        if self.is_one_item and not field.endswith("_ids"):
            return field, None
        return field, failure[0]

    def run(self, step: Any, message: Any, result: cpb.OperationResult) -> Slices[Failures]:
        """Do the items that can be done. Raises KvplaneError or ColumnError when none can."""
        yield from ()
        return self.do(step, message, result)

    def do(self, step: Any, message: Any, result: cpb.OperationResult) -> Failures:
        """``run`` of an operation that is one slice."""
        raise NotImplementedError
