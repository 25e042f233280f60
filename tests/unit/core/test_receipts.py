"""Receipts: all of a request are checked before one is applied, and each applies once."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.steps.receipts import take_receipts
from kvplane import ops
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    KvplaneError,
    ProtocolMismatchError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.slices import run_to_end
from kvplane.wire import signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_model import Engine, World
from tests.helpers.planning.registration_messages import signed
from tests.helpers.refusals import refused

UNKNOWN_FIELD = b"\xc2\x3e\x01x"  # field 1000, one byte


@pytest.fixture(params=[True, False], ids=["expected", "not yet expected"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Plans 1 and 2 have run: a prompt of 12 tokens, and 6 more."""
    engine = World().engine()
    engine.step(ops.admit(1, range(12)))
    session = engine.session
    if request.param:
        session.settle()
    engine.step(engine.growth(1, range(12, 18), 6))
    if request.param:
        session.settle()
    engine.run_all()
    return engine


def signed_by(engine: Engine, payload: bytes, type_tag: str = signing.RECEIPT) -> tpb.SignedPayload:
    return signed(engine.world.pool.key, payload, type_tag)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"version": 9}, ProtocolMismatchError, "version"),
        ({"session": tpb.SessionRef(incarnation=9)}, StaleIncarnationError, "session.incarnation"),
        ({"session": tpb.SessionRef(session_id=9)}, BadSignatureError, "session.session_id"),
        ({"pool_id": "other"}, BadSignatureError, "pool_id"),
        ({"shard_index": 1}, BadSignatureError, "shard_index"),
        ({"epoch": 1}, StaleEpochError, "epoch"),
        ({"plan_number": 3}, BadSignatureError, "plan_number"),
        ({"plan_number": 0}, BadSignatureError, "plan_number"),
        ({"plan_number": -1}, BadSignatureError, "plan_number"),
        ({"plan_digest": b"other"}, BadSignatureError, "plan_digest"),
    ],
)
def test_one_of_something_else_is_named_and_spoils_those_beside_it(
    engine: Engine, fields: dict[str, Any], error: type[KvplaneError], field: str
) -> None:
    first, second = engine.receipts
    receipt = plan_pb2.Receipt.FromString(first.payload)
    if "plan_number" in fields:
        receipt.ClearField("plan_number")  # or 0 would be left out
    receipt.MergeFrom(plan_pb2.Receipt(**fields))
    with refused(error, f"receipts[1].{field}"):
        engine.submit([second, signed_by(engine, receipt.SerializeToString())])
    assert engine.state(1).num_written_tokens == 0


def test_one_that_is_not_signed_or_can_not_be_read_is_refused(engine: Engine) -> None:
    good = engine.receipts[0]
    flipped = good.signature[:-1] + bytes([good.signature[-1] ^ 1])
    wrong: tuple[tuple[tpb.SignedPayload, type[KvplaneError], str], ...] = (
        (signed_by(engine, good.payload, signing.PLAN), BadSignatureError, "type"),
        (
            tpb.SignedPayload(type=signing.PLAN, payload=good.payload, signature=good.signature),
            BadSignatureError,
            "type",
        ),
        (
            tpb.SignedPayload(type=good.type, payload=good.payload, signature=flipped),
            BadSignatureError,
            "signature",
        ),
        (signed_by(engine, b"\xff"), InvalidRequestError, "payload"),
        (signed_by(engine, good.payload + UNKNOWN_FIELD), InvalidRequestError, "payload"),
    )
    for payload, error, field in wrong:
        with refused(error, f"receipts[0].{field}"):
            engine.submit([payload])
    assert engine.state(1).num_written_tokens == 0


def test_that_of_a_plan_stands_for_all_before_it_and_applies_once(engine: Engine) -> None:
    session = engine.session
    first, second = engine.receipts
    for receipts in ([second], [second, first, second]):
        engine.submit(receipts)
        assert (session.done, session.plans, session.expected) == (2, {}, {})
        assert engine.state(1).num_written_tokens == 18
        assert engine.world.observed().counters.num_publications == 2
    engine.world.core.check_integrity()


def test_receipts_are_expected_of_plans_in_flight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = World().engine()
    session = engine.session
    engine.step(ops.admit(1, range(12)))
    session.settle()
    session.settle()
    engine.run_all()
    assert list(session.expected) == [engine.receipts[0].payload]
    with monkeypatch.context() as patch:
        patch.setattr(signing, "verify", None)  # an expected receipt is not looked into
        admission = engine.world.core.sessions.admission_of(session.pool)
        run_to_end(take_receipts(session, admission, engine.receipts))
    assert (session.done, session.expected) == (1, {})
    engine.step(engine.growth(1, range(12, 18), 6))
    session.settle()
    engine.abort(engine.number)
    assert session.expected == {}
