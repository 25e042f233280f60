"""What came of operations, as the control plane said it."""

from __future__ import annotations

from typing import Any

from kvplane.wire.v1 import session_pb2 as pb


def is_refused(result: pb.OperationResult) -> bool:
    """Return whether the operation failed as a whole, so that no item of it was done."""
    return bool(result.failures) and not (result.num_table_blocks or result.num_released_blocks)


def outcomes(answer: Any) -> list[pb.OperationResult]:
    """Return the results in an answer of the contract or of the SDK, or the SDK's results."""
    results = answer if isinstance(answer, list) else answer.results
    return [getattr(result, "_message", result) for result in results]
