"""Receipts: all of a request are checked before one is applied, and each applies once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from control_plane.pools.shards import ShardState
from control_plane.sessions.session import Session
from control_plane.steps.abort import abort_plans
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
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.planning_rig import EPOCH, PlanningRig


@pytest.fixture(params=[True, False], ids=["expected", "not_yet_expected"])
def rig(request: pytest.FixtureRequest) -> PlanningRig:
    """Plans 1 and 2 are in flight: a prompt of 12 tokens, and 6 more."""
    rig = PlanningRig()
    rig.admit(1, range(12))
    if request.param:
        rig.session.settle()
    rig.step(ops.append(1, range(12, 18), 6, first_positions=12))
    if request.param:
        rig.session.settle()
    return rig


def take(session: Session, receipts: list[tpb.SignedPayload]) -> None:
    run_to_end(take_receipts(session, receipts))


def changed(rig: PlanningRig, change: Callable[[plan_pb2.Receipt], object]) -> tpb.SignedPayload:
    """The receipt of plan 1, changed and signed again."""
    receipt = plan_pb2.Receipt.FromString(rig.receipt(rig.session, 1).payload)
    change(receipt)
    return signed(rig, receipt.SerializeToString())


def signed(rig: PlanningRig, payload: bytes) -> tpb.SignedPayload:
    signature = signing.sign(rig.pool.key, signing.RECEIPT, payload)
    return tpb.SignedPayload(type=signing.RECEIPT, payload=payload, signature=signature)


def setting(**fields: Any) -> Callable[[plan_pb2.Receipt], object]:
    return lambda receipt: receipt.MergeFrom(plan_pb2.Receipt(**fields))


BAD: dict[str, tuple[Callable[[plan_pb2.Receipt], object], type[KvplaneError], str]] = {
    "another version": (setting(version=9), ProtocolMismatchError, "version"),
    "another control plane": (
        setting(session=tpb.SessionRef(incarnation=9)),
        StaleIncarnationError,
        "session.incarnation",
    ),
    "another session": (
        setting(session=tpb.SessionRef(session_id=9)),
        BadSignatureError,
        "session.session_id",
    ),
    "another pool": (setting(pool_id="other"), BadSignatureError, "pool_id"),
    "no shard": (setting(shard_index=1), BadSignatureError, "shard_index"),
    "another process": (setting(epoch=EPOCH + 1), StaleEpochError, "epoch"),
    "a plan to come": (setting(plan_number=3), BadSignatureError, "plan_number"),
    "no plan": (
        lambda receipt: receipt.ClearField("plan_number"),
        BadSignatureError,
        "plan_number",
    ),
    "another plan": (setting(plan_digest=b"other"), BadSignatureError, "plan_digest"),
}


@pytest.mark.parametrize("reason", BAD)
def test_one_that_is_wrong_is_named_and_spoils_those_beside_it(
    rig: PlanningRig, reason: str
) -> None:
    change, error, field = BAD[reason]
    with pytest.raises(error) as refused:
        take(rig.session, [rig.receipt(rig.session, 2), changed(rig, change)])
    assert refused.value.field == f"receipts[1].{field}"
    assert (rig.session.done, list(rig.session.plans)) == (0, [1, 2])


@pytest.mark.parametrize("payload", [b"\xff", b"\x08\x01\xc2\x3e\x01x"])
def test_signed_bytes_that_are_no_receipt_or_more_than_one_are_refused(
    rig: PlanningRig, payload: bytes
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        take(rig.session, [signed(rig, payload)])
    assert refused.value.field == "receipts[0].payload"


def test_a_signature_of_another_key_is_refused(rig: PlanningRig) -> None:
    receipt = rig.receipt(rig.session, 1)
    receipt.signature = signing.sign(b"k" * 32, signing.RECEIPT, receipt.payload)
    with pytest.raises(BadSignatureError):
        take(rig.session, [receipt])


@pytest.mark.parametrize("field", ["type", "signature"])
def test_a_receipt_of_the_expected_bytes_still_needs_its_signature(
    rig: PlanningRig, field: str
) -> None:
    receipt = rig.receipt(rig.session, 1)
    if field == "type":
        receipt.type = signing.PLAN
    else:
        receipt.signature = receipt.signature[:-1] + bytes([receipt.signature[-1] ^ 1])
    with pytest.raises(BadSignatureError) as refused:
        take(rig.session, [receipt])
    assert refused.value.field == f"receipts[0].{field}"
    rig.check()


def test_receipts_are_expected_of_plans_in_flight_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.session.settle()
    rig.session.settle()
    assert list(rig.session.expected) == [rig.receipt(rig.session, 1).payload]
    with monkeypatch.context() as patch:
        patch.setattr(signing, "verify", None)  # an expected receipt is not looked into
        take(rig.session, [rig.receipt(rig.session, 1)])
    assert (rig.session.done, rig.session.expected) == (1, {})
    rig.step(ops.append(1, range(12, 18), 6, first_positions=12))
    rig.session.settle()
    run_to_end(abort_plans(rig.session, cpb.AbortPlansRequest(number=3, plan_number=2)))
    assert rig.session.expected == {}
    rig.check()


def test_what_was_written_is_published_and_what_was_retired_becomes_free(rig: PlanningRig) -> None:
    rig.run(up_to=1)
    rig.check()
    assert (rig.state(1).num_written, rig.session.done, list(rig.session.plans)) == (12, 1, [2])
    assert rig.found(range(18)) == 1
    rig.step(ops.free([1]))
    other = rig.open(2)
    assert rig.obtainable(other) == 5
    rig.run()
    rig.check()
    assert rig.obtainable(other) == 8
    assert rig.found(range(18)) == 2, "freed before its last receipt came"


def test_the_receipt_of_a_plan_stands_for_all_before_it(rig: PlanningRig) -> None:
    take(rig.session, [rig.receipt(rig.session, 2)])
    assert (rig.session.done, rig.session.plans) == (2, {})
    assert rig.state(1).num_written == 18
    rig.check()


def test_receipts_again_and_in_any_order_change_nothing_more(rig: PlanningRig) -> None:
    receipts = [rig.receipt(rig.session, number) for number in (2, 1, 2)]
    take(rig.session, receipts)
    rig.pool.announce()
    assert len(rig.published()) == 2
    take(rig.session, receipts)
    rig.pool.announce()
    assert rig.published() == []
    rig.check()


def test_a_plan_takes_effect_once_every_shard_has_run_it() -> None:
    rig = PlanningRig()
    shards = rig.pool.shards
    shards.num_shards = 2
    shards.states[1] = ShardState(shards.states[0].hello, rig.pool.layout)
    session = rig.open(2)
    rig.admit(1, range(8), session=session)
    first = rig.receipt(session, 1)
    second = plan_pb2.Receipt.FromString(first.payload)
    second.shard_index = 1
    take(session, [first])
    assert (session.done, rig.state(1, session=session).num_written) == (0, 0)
    take(session, [signed(rig, second.SerializeToString())])
    assert (session.done, rig.state(1, session=session).num_written) == (1, 8)
