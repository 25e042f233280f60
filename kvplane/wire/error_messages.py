"""Errors as the ``kvplane.v1.Error`` message that streams carry, and back.

One side catches the error that the other raised, field and retry delay included. An error whose
reason this release does not know becomes the class of its gRPC status code, so that it is still of
the right kind. Does not import gRPC: the control plane's core answers with such messages.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from google.protobuf import duration_pb2
from google.rpc import code_pb2  # type: ignore[import-untyped]

from kvplane.errors import (
    CODES,
    REASONS,
    ConflictError,
    DeadlineExceededError,
    IntegrityError,
    InternalError,
    InvalidRequestError,
    KvplaneError,
    NeverFitsError,
    NotFoundError,
    NotPermittedError,
    PlaneUnavailableError,
    ProtocolMismatchError,
    QuotaExceededError,
    SequenceExistsError,
    StaleError,
    UnauthenticatedError,
)
from kvplane.wire.v1 import types_pb2 as pb

# gRPC sends statuses as HTTP/2 trailers, and a peer accepts 8 KiB of them by default.
_MAX_MESSAGE_CHARS: Final = 1024
_MAX_FIELD_CHARS: Final = 256

_BY_CODE: Final[dict[str, type[KvplaneError]]] = {
    # A server that stops cancels its calls; a call that this side cancels does not come here.
    "CANCELLED": PlaneUnavailableError,
    "INVALID_ARGUMENT": InvalidRequestError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "NOT_FOUND": NotFoundError,
    "ALREADY_EXISTS": SequenceExistsError,
    "PERMISSION_DENIED": NotPermittedError,
    # gRPC itself answers with this code when a message is over the size limit.
    "RESOURCE_EXHAUSTED": QuotaExceededError,
    "FAILED_PRECONDITION": ConflictError,
    "ABORTED": StaleError,
    "OUT_OF_RANGE": NeverFitsError,
    # The peer does not know the method.
    "UNIMPLEMENTED": ProtocolMismatchError,
    "UNAVAILABLE": PlaneUnavailableError,
    "DATA_LOSS": IntegrityError,
    "UNAUTHENTICATED": UnauthenticatedError,
}


REQUEST_ID: Final[ContextVar[str]] = ContextVar("kvplane_request_id", default="")
"""Context variable: the request id of the call that a server is answering."""


def to_wire(error: KvplaneError) -> pb.Error:
    """Convert an error to the message that streams carry."""
    return pb.Error(
        code=_code(error),
        reason=error.reason,
        message=error.message[:_MAX_MESSAGE_CHARS],
        field=error.field[:_MAX_FIELD_CHARS],
        retry_delay=duration_of(error.retry_delay_s),
        request_id=REQUEST_ID.get(),
        next_number=error.next_number,
    )


def from_wire(message: pb.Error) -> KvplaneError:
    """Convert a message of ``to_wire`` back to an error."""
    delay_s = seconds_of(message.retry_delay) if message.HasField("retry_delay") else None
    error = make_error(message.reason, message.code, message.message, message.field, delay_s)
    error.request_id, error.next_number = message.request_id, message.next_number
    return error


def make_error(
    reason: str, code: int, message: str, field: str, retry_delay_s: float | None
) -> KvplaneError:
    """Make the error for a reason or, if the reason is not known, for a gRPC status code."""
    cls = REASONS.get(reason)
    if cls is None:
        known = code in code_pb2.Code.values()
        cls = _BY_CODE.get(code_pb2.Code.Name(code), InternalError) if known else InternalError
    return cls(message, field=field, retry_delay_s=retry_delay_s)


def _code(error: KvplaneError) -> int:
    return int(code_pb2.Code.Value(CODES.get(type(error), "INTERNAL")))


def duration_of(seconds: float | None) -> duration_pb2.Duration | None:
    """Convert seconds to a Duration message; None to None."""
    if seconds is None:
        return None
    return duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


def seconds_of(duration: duration_pb2.Duration) -> float:
    """Convert a Duration message to seconds: the inverse of ``duration_of``."""
    return duration.seconds + duration.nanos / 1e9
