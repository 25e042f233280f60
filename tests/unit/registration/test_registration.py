"""Who may be a shard of a pool, who is resumed, who must report again, and what each is sent."""

from __future__ import annotations

from typing import Any

import pytest

from kvplane.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.release import release
from kvplane.wire import columns, protocol, signing
from kvplane.wire.columns import INT32
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_model import INCARNATION, World
from tests.helpers.planning.registration_messages import LAYOUT, TENANT, chain, half, report
from tests.helpers.refusals import refused


def two_halves(world: World, **fields: Any) -> tuple[Plane, Plane]:
    """A pool of two shards, ready."""
    planes = tuple(Plane(world, shard=half(i), epoch=10 + i, **fields) for i in range(2))
    for plane in planes:
        plane.join()
    assert world.pool.ready
    return planes[0], planes[1]


def test_a_shard_registers_reports_and_is_resumed_without_the_key() -> None:
    world = World(0)
    plane = Plane(world)
    known = {"version": release(), "payload_version": protocol.NEWEST_PAYLOAD_VERSION}
    welcome = plane.register()
    assert welcome == rpb.Welcome(incarnation=INCARNATION, key=world.pool.key, **known)
    assert not world.pool.ready
    plane.report(report({0: 3}, last=False))
    assert not world.pool.ready
    plane.report(report({1: 5}))
    assert world.pool.ready
    assert world.generations()[:3] == [3, 5, 0]
    plane.leave()
    assert not world.pool.ready
    assert plane.register() == rpb.Welcome(incarnation=INCARNATION, resumed=True, **known)
    assert world.pool.ready


def test_of_two_processes_that_claim_one_shard_the_older_stays_out() -> None:
    world = World(0)
    old, new = Plane(world, epoch=5), Plane(world, epoch=6)
    old.join()
    new.join()
    engine = world.engine()
    for _ in range(3):
        with refused(StaleEpochError, "hello.epoch", "start it with --epoch 7"):
            old.register()
    assert world.pool.ready
    engine.renew()  # the refused process has not ended it
    assert world.pool.epochs == [6]


def test_a_later_process_takes_over_with_a_new_key_and_ends_all_sessions() -> None:
    world = World(0)
    old, new = Plane(world, epoch=5), Plane(world, epoch=6)
    old.join()
    engine = world.engine()
    assert new.join().key != old.welcome.key
    for late in (engine.renew, old.report, lambda: old.fence_done(engine.ref)):
        with pytest.raises(StaleEpochError):
            late()
    old.leave()
    assert world.pool.ready


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key_id", signing.key_id(bytes(32))),
        ("incarnation", INCARNATION - 1),
        ("num_device_blocks", 15),
        ("num_host_blocks", 9),
    ],
)
def test_only_what_has_not_changed_is_resumed(field: str, value: Any) -> None:
    world = World(0)
    plane = Plane(world)
    plane.join()
    assert not plane.register(**{field: value}).resumed
    assert not world.pool.ready
    plane.report()
    assert plane.register().resumed


def test_control_planes_of_one_incarnation_are_told_apart_by_their_keys() -> None:
    first, second = World(0), World(0)
    second.core._registration._new_key = lambda: bytes(32)
    plane = Plane(first)
    plane.join()
    plane.leave()
    plane.world = second
    assert not plane.register().resumed
    plane.report()
    plane.leave()
    plane.world = first
    assert not plane.register().resumed, "the key that it holds is the other control plane's"
    plane.report()
    assert plane.hello.key_id == signing.key_id(first.pool.key)


def test_a_later_control_plane_is_not_left_for_an_earlier_one() -> None:
    with refused(StaleIncarnationError, "hello.incarnation"):
        Plane(World(0)).register(incarnation=INCARNATION + 1)


def test_a_shard_that_had_not_reported_begins_anew() -> None:
    plane = Plane(World(0))
    plane.register()
    plane.report(report({3: 9}, last=False))
    plane.leave()
    assert not plane.register().resumed
    plane.report()
    assert plane.world.generations()[3] == 0, "the part of the broken stream counts"


def test_a_report_that_was_not_asked_for_is_refused() -> None:
    world = World(0)
    left, right = two_halves(world)
    with refused(InvalidRequestError, "report", "is complete"):
        left.report()
    Plane(world, shard=half(1), epoch=12).join()
    with pytest.raises(InvalidRequestError, match="not asked for"):
        left.report()  # an earlier one, as the request has not been sent
    assert left.kinds() == ["report_request"]
    left.report()
    assert world.pool.ready
    assert right.hello.epoch == 11


def test_shards_that_stay_fence_all_sessions_and_report_again() -> None:
    world = World(0)
    left, right = two_halves(world)
    engine = world.engine(TENANT)
    blocks = engine.write([0] * 8)
    assert left.kinds() == ["publish"]

    successor = Plane(world, shard=half(1), epoch=12)
    successor.join(report({blocks[0]: 1}))
    assert successor.welcome.key == left.welcome.key
    fence, request = left.take()
    assert (fence.fence.session, fence.fence.ordinal) == (engine.ref, 1)
    assert request.HasField("report_request")
    held = chain([0] * 8, [(blocks[0], 1)])
    left.report(report({blocks[0]: 1}, *held))
    assert not world.pool.ready, "the session is not fenced"
    left.fence_done(engine.ref)
    assert world.pool.ready
    assert world.found([0] * 8) == [], "the new process does not hold it"
    with pytest.raises(StaleEpochError):
        right.report()


def test_a_shard_that_stays_is_asked_again_when_its_stream_breaks() -> None:
    world = World(0)
    left, _ = two_halves(world)
    engine = world.engine()
    Plane(world, shard=half(1), epoch=12).join()
    assert left.kinds() == ["fence", "report_request"]
    left.report(report({3: 4}, last=False))
    left.leave()
    with pytest.raises(InvalidRequestError, match="not asked for"):
        left.report()  # a delayed part of the broken stream
    assert left.register().resumed
    with pytest.raises(InvalidRequestError, match="not asked for"):
        left.report()
    assert left.kinds() == ["fence", "report_request"]
    left.fence_done(engine.ref)
    left.report(report({3: 5}))
    assert world.pool.ready
    assert world.generations()[3] == 5


def test_a_shard_is_asked_once_however_often_another_restarts() -> None:
    world = World(0)
    left, _ = two_halves(world)
    for epoch in range(12, 15):
        last = Plane(world, shard=half(1), epoch=epoch)
        last.join()
    assert left.kinds() == ["report_request"]
    left.report()
    assert world.pool.ready
    Plane(world, shard=half(1), epoch=15).register()
    assert left.kinds() == ["report_request"]
    assert last.hello.epoch == 14


def test_a_finished_fence_counts_only_for_a_session_that_ended_here() -> None:
    world = World(0)
    plane = Plane(world)
    plane.join()
    engine = world.engine()
    id_ = engine.id
    plane.fence_done(engine.ref)  # it is open
    engine.close()
    plane.fence_done(tpb.SessionRef(incarnation=INCARNATION - 1, session_id=id_))
    plane.fence_done(tpb.SessionRef(incarnation=INCARNATION, session_id=id_ + 1))
    assert world.pool.shards.is_fencing
    plane.fence_done(engine.ref)
    plane.fence_done(engine.ref)
    assert not world.pool.shards.is_fencing


def test_a_process_that_comes_back_unknown_must_fence_what_it_may_still_run() -> None:
    """Where the key stays, sessions of before could go on with it."""
    world = World(0)
    left, right = two_halves(world)
    engine = world.engine()
    right.leave()
    assert not right.register(key_id=signing.key_id(bytes(32))).resumed
    assert right.take() == [], "its report comes first"
    right.report()
    assert right.kinds() == ["fence"]
    left.take()
    left.report()
    left.fence_done(engine.ref)
    assert not world.pool.ready
    right.fence_done(engine.ref)
    assert world.pool.ready


@pytest.mark.parametrize(
    ("shard", "field"),
    [
        (half(1, num_shards=3), "hello.shard.num_shards"),
        (tpb.Shard(index=1, num_shards=2, num_layers=1, num_kv_heads=1), "hello.shard"),
        (tpb.Shard(index=1, num_shards=2, num_layers=2, num_kv_heads=2), "hello.shard"),
    ],
)
def test_a_shard_that_does_not_go_with_the_others_is_refused(shard: tpb.Shard, field: str) -> None:
    world = World(0)
    left = Plane(world, shard=half(0), epoch=10)
    left.join()
    with pytest.raises(InvalidRequestError) as refusal:
        Plane(world, shard=shard, epoch=12).register()
    assert refusal.value.field == field
    assert field != "hello.shard" or "shard 0" in refusal.value.message
    other = LAYOUT.to_proto()
    other.model_id, other.fingerprint = "other", b""
    with pytest.raises(LayoutMismatchError):
        Plane(world, shard=half(1), epoch=12, layout=other).register()
    Plane(world, shard=half(1), epoch=12).join()
    assert world.pool.ready


def test_a_pool_is_ready_only_when_its_shards_hold_every_head_of_every_layer() -> None:
    world = World(0)
    parts = [(0, 1, 0, 2), (1, 1, 0, 1), (1, 1, 1, 1)]
    for i, (layer, num_layers, head, num_heads) in enumerate(parts):
        assert i == 0 or not world.pool.ready
        shard = tpb.Shard(
            index=i,
            num_shards=3,
            first_layer=layer,
            num_layers=num_layers,
            first_kv_head=head,
            num_kv_heads=num_heads,
        )
        Plane(world, shard=shard, epoch=10 + i).join()
    assert world.pool.ready

    gap = World(0)
    for i in range(2):
        shard = tpb.Shard(index=i, num_shards=2, num_layers=1, first_kv_head=i, num_kv_heads=1)
        Plane(gap, shard=shard, epoch=10 + i).join()
    assert not gap.pool.ready
    assert "every KV head of every layer" in gap.pool.shards.what_is_missing()


def test_a_pool_takes_another_shape_when_its_old_shards_are_gone_and_older() -> None:
    world = World(0)
    left, right = two_halves(world)
    left.leave()
    right.leave()
    with pytest.raises(StaleEpochError):
        Plane(world, epoch=10).register()  # shard 1 is of a later process
    whole = Plane(world, epoch=12)
    assert whole.join().key != left.welcome.key
    assert world.pool.ready
    for old in (left, right):
        with pytest.raises(InvalidRequestError if old is right else StaleEpochError):
            old.register()
    whole.leave()
    with pytest.raises(StaleEpochError):
        right.register()
    assert world.pool.epochs == [12]


def test_a_shard_that_came_back_is_sent_all_that_it_may_have_missed() -> None:
    world = World(0)
    plane = Plane(world)
    plane.join()
    engine = world.engine(TENANT)
    plane.leave()
    blocks = engine.write(range(24))
    world.pool.announce()
    engine.close()
    assert plane.register().resumed
    fence, publish = plane.take()
    assert fence.fence.session == engine.ref
    sent = publish.publish.publications
    assert list(columns.read(INT32, sent.indices, "indices")) == blocks
    assert list(columns.read(INT32, sent.parent_indices, "parents")) == [-1, *blocks[:2]]
    assert (sent.tenant, sent.namespace, sent.hash_algorithm) == ("default", "", "xxh3-128")
    assert plane.take() == []


def test_the_highest_generation_that_may_be_reported_leaves_room_for_more() -> None:
    world = World(0)
    plane = Plane(world)
    plane.join(report(dict.fromkeys(range(16), 2**62)))
    blocks = world.engine().write(range(9))
    assert [world.generations()[block] for block in blocks] == [2**62 + 1] * 2
