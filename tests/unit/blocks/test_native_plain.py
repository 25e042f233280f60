"""Requests that are read without a message: only those of the shape that a plain step has, and to
the byte as protobuf's own writers encode them.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvplane_blocks import MAX_PLAIN_RECEIPTS, PlainStep

from control_plane.sessions.numbering import content_of
from kvplane import ops
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32, INT64


def decode_step(num_receipts: int = 1) -> cpb.StepRequest:
    """A step that reads as a plain one."""
    receipt = tpb.SignedPayload(
        type=signing.RECEIPT,
        payload=tpb.Receipt(version=1, plan_number=2).SerializeToString(),
        signature=bytes(32),
    )
    return cpb.StepRequest(
        session=tpb.SessionRef(incarnation=3, session_id=5),
        number=300,
        operations=[ops.append([1, 2], [7, 8], 1, first_positions=[3, 4], num_tokens=1)],
        receipts=[receipt] * num_receipts,
    )


def test_what_is_read_of_a_plain_step() -> None:
    request = decode_step()
    step = PlainStep.read(request.SerializeToString())
    assert step is not None
    assert (step.incarnation, step.session_id, step.number, step.num_items) == (3, 5, 300, 2)
    (receipt,) = request.receipts
    assert step.receipts == [(2, 0, receipt.payload, receipt.signature)]
    assert step.content == content_of(request)
    assert (step.kind, step.num_tokens) == ("append", 2)


def test_what_is_read_of_an_admission() -> None:
    request = decode_step(0)
    del request.operations[:]
    request.operations.append(ops.admit(2**40, range(300), max_total_tokens=900))
    step = PlainStep.read(request.SerializeToString())
    assert step is not None
    assert (step.kind, step.sequence_id, step.num_tokens) == ("admit", 2**40, 300)
    assert step.content == content_of(request)


APPEND = ops.append([1, 2], [7, 8], 1, first_positions=[3, 4], num_tokens=1).append


def changed(**fields: bytes) -> cpb.Operation:
    """An append of which some columns are others."""
    append = cpb.Append()
    append.CopyFrom(APPEND)
    for field, column in fields.items():
        setattr(append, field, column)
    return cpb.Operation(append=append)


@pytest.mark.parametrize(
    "operation",
    [
        changed(sequence_ids=b""),
        changed(sequence_ids=columns.pack(INT64, [1])),
        changed(first_positions=bytes(15)),
        changed(first_positions=bytes(24)),
        changed(num_slots=columns.pack(INT32, [1, 1, 1])),
        changed(num_slots=columns.pack(INT32, [1])),
        changed(num_tokens=columns.pack(INT32, [3, -1])),
        changed(num_tokens=columns.pack(INT32, [1, 2])),
        changed(token_ids=bytes(7)),
        changed(num_lookahead_slots=columns.pack(INT32, [1, 1])),
        cpb.Operation(admit=cpb.Admit(sequence_id=1)),
        cpb.Operation(admit=cpb.Admit(token_ids=bytes(4))),
        cpb.Operation(admit=cpb.Admit(sequence_id=1, token_ids=bytes(7))),
        cpb.Operation(admit=cpb.Admit(sequence_id=1, token_ids=bytes(4), max_total_tokens=2**41)),
    ],
    ids=str,
)
def test_columns_that_do_not_fit_are_left_to_the_message(operation: cpb.Operation) -> None:
    request = decode_step(0)
    del request.operations[:]
    request.operations.append(operation)
    assert PlainStep.read(request.SerializeToString()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"traceparent": "00"},
        {"deferred_tokens": cpb.DeferredTokens()},
        {"number": -1},
        {"operations": [ops.append(1, [2], first_positions=3)] * 2},
        {"operations": [cpb.Operation()]},
        {"operations": [cpb.Operation(free=cpb.Free(sequence_ids=bytes(8)))]},
        {"operations": [ops.admit(1, [2], fork_sequence_ids=[3])]},
        {"operations": [ops.admit(1, [2], num_compute_tokens=0)]},
        {"operations": [ops.admit(1, [2], wait=True)]},
        {"receipts": [tpb.SignedPayload(type=signing.PLAN, payload=b"\x08\x01", signature=b"1")]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_step_of_another_shape_is_not_plain(change: dict[str, Any]) -> None:
    request = decode_step(0)
    assert PlainStep.read(request.SerializeToString()) is not None
    for field, value in change.items():
        request.ClearField(field)
        request.MergeFrom(cpb.StepRequest(**{field: value}))
    assert PlainStep.read(request.SerializeToString()) is None


def test_a_plain_step_has_few_receipts() -> None:
    assert PlainStep.read(decode_step(MAX_PLAIN_RECEIPTS).SerializeToString()) is not None
    assert PlainStep.read(decode_step(MAX_PLAIN_RECEIPTS + 1).SerializeToString()) is None


@given(st.data())
def test_bytes_that_read_as_a_plain_step_are_what_protobuf_writes(data: st.DataObject) -> None:
    encoded = bytearray(decode_step().SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(encoded) - 1))
        if data.draw(st.booleans()):
            encoded[place] = data.draw(st.integers(0, 255))
        else:
            del encoded[place : place + data.draw(st.integers(1, 4))]
    step = PlainStep.read(bytes(encoded))
    if step is not None:
        request = cpb.StepRequest.FromString(bytes(encoded))
        assert request.SerializeToString(deterministic=True) == encoded
        assert step.content == content_of(request)
        assert (step.session_id, step.number) == (request.session.session_id, request.number)
        assert len(step.receipts) == len(request.receipts)
