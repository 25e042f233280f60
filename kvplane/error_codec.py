"""Errors on the wire and back: ``kvplane.v1.Error`` in streams, ``google.rpc.Status`` elsewhere.

What one side raises is what the other catches, field and retry delay included. An error that names
a reason of a later release falls back on the gRPC status code, so that it still lands in the right
branch of the tree.
"""

from __future__ import annotations

from typing import Final, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import (  # type: ignore[import-untyped]
    code_pb2,
    error_details_pb2,
    status_pb2,
)
from grpc_status import rpc_status

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
    UnauthenticatedError,
)
from kvplane.v1 import types_pb2 as pb

DOMAIN: Final = "kvplane"

# Statuses travel as HTTP/2 trailers, of which a peer takes 8 KiB by default.
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
    # gRPC itself answers so when a message is over the size limit.
    "RESOURCE_EXHAUSTED": QuotaExceededError,
    "FAILED_PRECONDITION": ConflictError,
    "OUT_OF_RANGE": NeverFitsError,
    # The peer does not know the method.
    "UNIMPLEMENTED": ProtocolMismatchError,
    "UNAVAILABLE": PlaneUnavailableError,
    "DATA_LOSS": IntegrityError,
    "UNAUTHENTICATED": UnauthenticatedError,
}


def to_wire(error: KvplaneError) -> pb.Error:
    """As the message that streams carry."""
    return pb.Error(
        code=_code(error),
        reason=error.reason,
        message=error.message[:_MAX_MESSAGE_CHARS],
        field=error.field[:_MAX_FIELD_CHARS],
        retry_delay=_duration(error.retry_delay_s),
    )


def from_wire(message: pb.Error) -> KvplaneError:
    """The inverse of ``to_wire``."""
    delay_s = _seconds(message.retry_delay) if message.HasField("retry_delay") else None
    return _make(message.reason, message.code, message.message, message.field, delay_s)


def to_rich_status(error: KvplaneError) -> status_pb2.Status:
    """As a status whose details are ErrorInfo and, where they apply, BadRequest and RetryInfo.

    The scheme is Google's AIP-193.
    """
    wire = to_wire(error)
    info = error_details_pb2.ErrorInfo(reason=wire.reason, domain=DOMAIN)
    if wire.field:
        info.metadata["field"] = wire.field
    details = [_any(info)]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=wire.field, description=wire.message
        )
        details.append(_any(error_details_pb2.BadRequest(field_violations=[violation])))
    if wire.HasField("retry_delay"):
        details.append(_any(error_details_pb2.RetryInfo(retry_delay=wire.retry_delay)))
    return status_pb2.Status(code=wire.code, message=wire.message, details=details)


def from_rpc_error(error: grpc.Call | grpc.aio.AioRpcError) -> KvplaneError:
    """What a failed call means; by its status code alone when it carries no details of ours.

    ``error`` is what an awaited gRPC call raised, or a blocking one (that is a ``grpc.Call`` too).
    """
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:  # details that contradict the status: not ours
        status = None
    if status is None:
        code, text = error.code(), error.details()
        return _make("", code.value[0], text or code.name, "", None)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    reason, field, delay_s = "", "", None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, field = info.reason, info.metadata.get("field", "")
        elif detail.Unpack(retry):
            delay_s = _seconds(retry.retry_delay)
    return _make(reason, status.code, status.message, field, delay_s)


def _make(
    reason: str, code: int, message: str, field: str, retry_delay_s: float | None
) -> KvplaneError:
    cls = REASONS.get(reason)
    if cls is None:
        known = code in code_pb2.Code.values()
        cls = _BY_CODE.get(code_pb2.Code.Name(code), InternalError) if known else InternalError
    return cls(message, field=field, retry_delay_s=retry_delay_s)


def _code(error: KvplaneError) -> int:
    return int(code_pb2.Code.Value(CODES.get(type(error), "INTERNAL")))


def _any(message: error_details_pb2.ErrorInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _duration(seconds: float | None) -> duration_pb2.Duration | None:
    if seconds is None:
        return None
    return duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
