"""Answers that hold a plan of some megabytes, encoded with one copy of it.

A message would copy the plan when it is set, and twice more when it is encoded. Where new pages
must first be mapped, each copy takes as long as hashing the plan.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

LARGE_BYTES: Final = 1 << 20
"""A plan of more than this makes an answer large."""
_DELIMITED: Final = 2  # the wire type of strings, bytes and messages


class LargeAnswer(NamedTuple):
    """``encoded``: a StepResponse. ``response``: the same, but its plan has no payload."""

    encoded: bytes
    response: cpb.StepResponse


def large_answer(response: cpb.StepResponse, payload: bytes) -> LargeAnswer:
    """Return the answer with this payload in its signed plan. Fields are in the order in which a
    message writes them.
    """
    result = response.result
    before = cpb.StepResult(results=result.results).SerializeToString()
    after = cpb.StepResult()
    after.CopyFrom(result)
    after.ClearField("results")
    after.ClearField("plan")
    kind = tpb.SignedPayload(type=result.plan.type).SerializeToString()
    signature = tpb.SignedPayload(signature=result.plan.signature).SerializeToString()
    plan = [kind, _header(tpb.SignedPayload, "payload", len(payload)), payload, signature]
    parts = [before, _header(cpb.StepResult, "plan", _size(plan)), *plan, after.SerializeToString()]
    head = cpb.StepResponse(number=response.number).SerializeToString()
    encoded = b"".join([head, _header(cpb.StepResponse, "result", _size(parts)), *parts])
    return LargeAnswer(encoded, response)


def _size(parts: list[bytes]) -> int:
    return sum(map(len, parts))


def _header(message: type, field: str, num_bytes: int) -> bytes:
    """Return the tag and length before a field of ``num_bytes``."""
    number = message.DESCRIPTOR.fields_by_name[field].number  # type: ignore[attr-defined]
    return _varint(number << 3 | _DELIMITED) + _varint(num_bytes)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
