"""The items of one operation that were not done, and why."""

from __future__ import annotations

from control_plane.planning.steps.room import NoRoom
from kvplane.error_messages import to_wire
from kvplane.errors import KvplaneError
from kvplane.v1 import control_pb2 as cpb


class Failures:
    """Collects them in ascending order."""

    __slots__ = ("_at", "items")

    def __init__(self, at: str) -> None:
        """``at`` is where the operation stands in the request, such as "operations[2].append"."""
        self._at = at
        self.items: list[cpb.ItemFailure] = []

    def add(self, error: KvplaneError | NoRoom, item: int | None = None) -> None:
        """Record why an item was not done; None for the whole operation.

        The error's field is relative to the operation; the index of the item in that column is
        added, unless there is one already.
        """
        if isinstance(error, NoRoom):
            failure = cpb.ItemFailure(item=item or 0, status=error.status, shortage=error.shortage)
        else:
            field = f"{self._at}.{error.field}" if error.field else self._at
            if item is not None and not field.endswith("]"):
                field += f"[{item}]"
            wire = to_wire(error)
            wire.field = field
            failure = cpb.ItemFailure(
                item=item or 0, status=cpb.OPERATION_STATUS_FAILED, error=wire
            )
        self.items.append(failure)
