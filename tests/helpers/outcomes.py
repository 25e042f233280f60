"""What came of an operation."""

from __future__ import annotations

from kvplane.wire.v1 import session_pb2 as pb


def is_refused(result: pb.OperationResult) -> bool:
    """Return whether the operation failed as a whole, so that no item of it was done."""
    return bool(result.failures) and not (result.num_table_blocks or result.num_released_blocks)
