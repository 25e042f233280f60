"""A pool of two shards of which one says that plans ran and the other does not."""

from __future__ import annotations

import hashlib

import pytest

from control_plane import limits
from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from control_plane.observing import PoolObservation
from control_plane.sessions.silent_shards import num_missing_receipts
from kvplane import ops
from kvplane.errors import MissingReceiptError, PoolNotReadyError
from kvplane.wire import protocol, signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.registration_messages import LAYOUT, half, hello, report

TENANT = "default"
TIMEOUT_S = limits.RECEIPT_TIMEOUT_S


class World:
    """``now_s`` is the core's clock."""

    def __init__(self, num_shards: int = 2) -> None:
        self.now_s = 1000.0
        self.core = ControlPlane(
            incarnation=1,
            config=CoreConfig(lease_s=10_000.0),
            clock=lambda: self.now_s,
        )
        self.num_shards = num_shards
        for i in range(num_shards):
            self.join(i)

    def join(self, index: int, epoch: int = 11) -> None:
        shard = half(index) if self.num_shards == 2 else hello().shard
        self.key = self.core.register(hello(shard=shard, epoch=epoch)).key
        self.core.report("pool", index, epoch, report())
        self.deliver(index, epoch)

    def deliver(self, index: int, epoch: int = 11) -> None:
        """The shard does what it is asked."""
        for message in self.core.take_outgoing("pool", index):
            if message.HasField("fence"):
                done = rpb.FenceDone(session=message.fence.session)
                self.core.fence_done("pool", index, epoch, done)
            elif message.HasField("report_request"):
                self.core.report("pool", index, epoch, report())

    def open(self) -> tpb.SessionRef:
        request = pb.OpenSessionRequest(
            pool_id="pool", layout=tpb.Layout(fingerprint=LAYOUT.fingerprint)
        )
        return self.core.open_session(request, TENANT).session

    def step(self, session: tpb.SessionRef, number: int, *receipts: tpb.SignedPayload):
        operation = ops.admit(number, [1, 2], num_compute_tokens=2)
        step = pb.StepRequest(
            session=session, number=number, operations=[operation], receipts=receipts
        )
        return self.core.step(step, TENANT).plan

    def receipt(self, plan: tpb.SignedPayload, index: int) -> tpb.SignedPayload:
        read = plan_pb2.Plan.FromString(plan.payload)
        payload = plan_pb2.Receipt(
            version=protocol.NEWEST_PAYLOAD_VERSION,
            session=read.session,
            pool_id="pool",
            shard_index=index,
            epoch=11,
            plan_number=read.number,
            plan_digest=hashlib.sha256(plan.payload).digest(),
        ).SerializeToString()
        return tpb.SignedPayload(
            type=signing.RECEIPT,
            payload=payload,
            signature=signing.sign(self.key, signing.RECEIPT, payload),
        )

    def wait(self, seconds: float) -> None:
        """In steps in which the core does not take itself to have slept."""
        for _ in range(10):
            self.now_s += seconds / 10
            self.core.tick()

    def observe(self) -> PoolObservation:
        return self.core.observe_pool("pool")

    def ended(self) -> int:
        return self.observe().statistics.reclaimed_blocks["receipt"]


def test_a_plan_has_run_when_all_shards_have_receipted_it() -> None:
    world = World()
    session = world.open()
    plan = world.step(session, 1)
    assert world.observe().num_missing_receipts == [0, 0]
    later = world.step(session, 2, world.receipt(plan, 0))
    assert world.observe().num_missing_receipts == [0, 1]
    assert world.observe().num_plans_in_flight == 2
    world.step(session, 3, world.receipt(later, 0))
    assert world.observe().num_missing_receipts == [0, 2]
    world.step(session, 4, world.receipt(plan, 1), world.receipt(later, 1))
    assert world.observe().num_missing_receipts == [0, 0]
    assert world.observe().num_plans_in_flight == 2


def test_a_missing_receipt_ends_its_session_alone() -> None:
    world = World()
    session, other = world.open(), world.open()
    plan = world.step(session, 1)
    world.step(other, 1)
    world.step(session, 2, world.receipt(plan, 0))
    world.wait(TIMEOUT_S - 1)
    assert world.ended() == 0
    world.wait(2)
    assert world.ended() == 2
    with pytest.raises(MissingReceiptError):
        world.step(session, 3)
    for index in (0, 1):
        world.deliver(index)
    world.wait(3 * TIMEOUT_S)  # the other's plan has no receipt at all: nobody is late
    world.step(other, 2)
    assert world.core.get_pool("pool").ready
    world.core.check_integrity()


def test_a_plan_that_no_shard_has_receipted_is_only_long() -> None:
    world = World()
    session = world.open()
    plan = world.step(session, 1)
    world.wait(3 * TIMEOUT_S)
    world.step(session, 2, world.receipt(plan, 0), world.receipt(plan, 1))
    world.wait(3 * TIMEOUT_S)
    world.step(session, 3)


def test_a_shard_that_does_not_fence_such_a_session_either_ends_all() -> None:
    world = World()
    session, other = world.open(), world.open()
    plan = world.step(session, 1)
    world.step(other, 1)
    world.step(session, 2, world.receipt(plan, 0))
    world.wait(TIMEOUT_S + 1)
    world.deliver(0)
    world.wait(TIMEOUT_S - 2)
    world.core.renew_session(other, TENANT)
    assert world.core.get_pool("pool").ready
    world.wait(3)
    with pytest.raises(MissingReceiptError):
        world.step(other, 2)
    assert not world.core.get_pool("pool").ready
    world.deliver(0)
    with pytest.raises(PoolNotReadyError, match="shards 1 have not stopped"):
        world.open()
    world.join(1, epoch=12)
    world.deliver(0)
    world.open()
    world.core.check_integrity()


def test_a_shard_that_comes_to_after_all_is_used_again() -> None:
    world = World()
    plan = world.step(session := world.open(), 1)
    world.step(session, 2, world.receipt(plan, 0))
    world.wait(3 * TIMEOUT_S)
    assert not world.core.get_pool("pool").ready
    for index in (0, 1):
        world.deliver(index)
    world.open()


def test_a_session_that_closes_slowly_harms_nobody() -> None:
    """Only a fence after a missing receipt counts: a shard may be away while sessions end."""
    world = World()
    session, other = world.open(), world.open()
    world.core.close_session(session, TENANT)
    world.wait(10 * TIMEOUT_S)
    world.step(other, 1)


def test_a_pool_of_one_shard_lacks_no_receipts() -> None:
    world = World(num_shards=1)
    session = world.open()
    world.step(session, 1)
    world.wait(10 * TIMEOUT_S)
    world.step(session, 2)
    assert world.observe().num_missing_receipts == [0]
    assert num_missing_receipts(3, []) == [0, 0, 0]
