"""Errors of gRPC calls: ``google.rpc.Status`` with details, and back. For errors in streams, which
are ``kvplane.v1.Error``, see ``error_messages``.
"""

from __future__ import annotations

import re
from typing import Final, cast

import grpc
from google.protobuf import any_pb2
from google.rpc import (  # type: ignore[import-untyped]
    error_details_pb2,
    status_pb2,
)
from grpc_status import rpc_status

from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.wire.error_messages import from_wire as from_wire
from kvplane.wire.error_messages import make_error, seconds_of
from kvplane.wire.error_messages import to_wire as to_wire

DOMAIN: Final = "kvplane"
_NUMBER: Final = re.compile(r"[0-9]{1,18}")  # fits into 64 bits
# gRPC's own text for a request that never reaches our server, and what to do about it.
_TOO_LARGE: Final = "SERVER: Received message larger than max"
_SEND_LESS: Final = "send it in parts, or raise the control plane's --max-message-bytes"


def to_rich_status(error: KvplaneError) -> status_pb2.Status:
    """Convert an error to a gRPC status whose details are ErrorInfo and, where they apply,
    BadRequest and RetryInfo.

    The scheme is Google's AIP-193.
    """
    wire = to_wire(error)
    info = error_details_pb2.ErrorInfo(reason=wire.reason, domain=DOMAIN)
    if wire.field:
        info.metadata["field"] = wire.field
    if wire.request_id:
        info.metadata["request_id"] = wire.request_id
    if wire.next_number:
        info.metadata["next_number"] = str(wire.next_number)
    details = [_any(info)]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=wire.field, description=wire.message
        )
        details.append(_any(error_details_pb2.BadRequest(field_violations=[violation])))
    if wire.HasField("retry_delay"):
        details.append(_any(error_details_pb2.RetryInfo(retry_delay=wire.retry_delay)))
    # Clients without this library print the text alone, so it begins with the field.
    text = f"{wire.field}: {wire.message}" if wire.field else wire.message
    return status_pb2.Status(code=wire.code, message=text, details=details)


def from_rpc_error(error: grpc.Call | grpc.aio.AioRpcError) -> KvplaneError:
    """Convert the error of a failed gRPC call to ours; by its status code alone if it has no
    details of ours.

    ``error``: as an awaited or a blocking gRPC call raised it (the latter is a ``grpc.Call`` too).
    """
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:  # details that contradict the status: not ours
        status = None
    if status is None:
        code, text = error.code(), error.details()
        if text and text.startswith(_TOO_LARGE):
            text = f"{text}: {_SEND_LESS}"
        return make_error("", code.value[0], text or code.name, "", None)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    reason, field, request_id, next_number, delay_s = "", "", "", "", None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, field = info.reason, info.metadata.get("field", "")
            request_id = info.metadata.get("request_id", "")
            next_number = info.metadata.get("next_number", "")
        elif detail.Unpack(retry):
            delay_s = seconds_of(retry.retry_delay)
    text = status.message.removeprefix(f"{field}: ") if field else status.message
    typed = make_error(reason, status.code, text, field, delay_s)
    typed.request_id = request_id
    if _NUMBER.fullmatch(next_number):
        typed.next_number = int(next_number)
    return typed


def _any(message: error_details_pb2.ErrorInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
