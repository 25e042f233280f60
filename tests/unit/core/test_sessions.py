"""Leases and ends of sessions, and what the core keeps of them when either plane restarts."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from control_plane.registration.registration import begin_if_complete
from control_plane.sessions.pool_admission import DeviceBlocks, PoolAdmission, PoolNews
from control_plane.sessions.session import QueuedAdmission
from kvplane import ops
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    LayoutMismatchError,
    PoolNotFoundError,
    PoolNotReadyError,
    QuotaExceededError,
    SessionExpiredError,
    SessionNotFoundError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_messages import DEVICE, HOST, LAYOUT, POOL
from tests.helpers.core.core_model import World
from tests.helpers.refusals import refused


def test_a_pool_is_ready_when_all_its_shards_have_reported() -> None:
    world = World(2)
    core = world.core
    world.shards[1].restart()
    world.shards[1].register()
    with pytest.raises(PoolNotReadyError) as refused:
        world.engine()
    assert refused.value.retry_delay_s is not None
    world.shards[1].come()
    world.pump()
    world.engine()
    world.shards[0].leave()
    with pytest.raises(PoolNotReadyError):
        world.engine()
    with pytest.raises(PoolNotFoundError):
        core.get_pool("other")


def test_an_ended_sessions_callers_hear_why() -> None:
    world = World()
    closed, expired = world.engine(), world.engine()
    closed.close()
    closed.close()
    with pytest.raises(SessionNotFoundError):
        closed.renew()
    world.after(31)
    with pytest.raises(SessionExpiredError):
        expired.renew()
    killed = world.engine()
    with pytest.raises(SessionNotFoundError):
        world.core.renew_session(killed.ref, "someone else")
    with pytest.raises(SessionNotFoundError):
        world.core.close_session(killed.ref, "someone else")
    world.shards[0].restart()
    world.shards[0].come()
    with pytest.raises(StaleEpochError):
        killed.renew()


def test_blocks_of_an_ended_session_wait_for_every_shard() -> None:
    world = World(2)
    engine = world.engine()
    engine.admit(1, range(20))
    engine.close()
    assert world.usage()["retired"] == 3
    world.shards[0].pump()
    assert world.usage()["retired"] == 3
    world.shards[1].pump()
    assert world.usage()["retired"] == 0
    assert world.usage()["cached"] == 2


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"pool_id": "other"}, PoolNotFoundError, "pool_id"),
        ({"client_name": "x" * 129}, InvalidRequestError, "client_name"),
        ({"namespace": "x" * 129}, InvalidRequestError, "namespace"),
        ({"layout": tpb.Layout(fingerprint=b"short")}, InvalidRequestError, "layout.fingerprint"),
        ({"layout": tpb.Layout(fingerprint=bytes(32))}, LayoutMismatchError, "layout"),
    ],
)
def test_a_wrong_open_session_names_its_field(
    fields: dict[str, object], error: type[KvplaneError], field: str
) -> None:
    world = World()
    request = cpb.OpenSessionRequest(
        **{"pool_id": POOL, "layout": LAYOUT.to_proto(), **fields}  # type: ignore[arg-type]
    )
    with refused(error, field):
        world.core.open_session(request, "tenant")


def test_a_session_is_opened_with_a_signed_grant_that_says_all_it_may() -> None:
    world = World(2, max_sessions=2, max_plans_in_flight=7)
    first, second = world.engine(), world.engine("ann")
    with pytest.raises(QuotaExceededError):
        world.engine()
    opened = second.opened
    assert opened.max_plans_in_flight == 7
    assert opened.time_to_live.seconds == 30
    assert [shard.shard.index for shard in opened.shards] == [0, 1]
    key = world.shards[1].pool_key
    signed = opened.grant
    signing.verify(key, signing.GRANT, signed.type, signed.payload, signed.signature, field="grant")
    assert plan_pb2.SessionGrant.FromString(signed.payload) == plan_pb2.SessionGrant(
        version=NEWEST_PAYLOAD_VERSION,
        session=second.ref,
        ordinal=2,
        pool_id=POOL,
        shard_epochs=[shard.epoch for shard in world.shards],
        tenant="ann",
        layout_fingerprint=LAYOUT.fingerprint,
        max_plans_in_flight=7,
    )
    assert plan_pb2.SessionGrant.FromString(first.opened.grant.payload).ordinal == 1


def test_session_ids_are_random_and_never_given_twice() -> None:
    ids = iter([5, 5, 6, 5, 6, 7])
    world = World()
    world.core.sessions._new_session_id = lambda: next(ids)
    first, second = world.engine(), world.engine()
    first.close()
    third = world.engine()
    assert [engine.id for engine in (first, second, third)] == [5, 6, 7]
    core = ControlPlane(incarnation=1, config=CoreConfig(), clock=world.clock)
    drawn = {core.sessions._new_session_id() for _ in range(100)}
    assert len(drawn) == 100
    assert all(0 < session_id < 2**53 for session_id in drawn)


def test_a_request_of_another_incarnation_touches_no_session() -> None:
    """An engine cleans up after a restart of the control plane, whose ids may begin anew."""
    world = World()
    old = world.engine()
    old.admit(1, range(8))
    world.restart_control_plane()
    world.core.sessions._new_session_id = lambda: old.id
    new = world.engine()
    assert new.id == old.id
    new.admit(1, range(8))
    before = new.everything()
    old.number = new.number
    requests = (
        lambda: old.step(ops.free([1])),
        lambda: old.submit(),
        lambda: old.abort(1),
        lambda: old.resync(),
        lambda: old.renew(),
        lambda: old.close(),
        lambda: old.state(1),
        lambda: old.table(1),
    )
    for request in requests:
        with refused(StaleIncarnationError, "session.incarnation"):
            request()
    assert new.everything() == before


def test_a_pool_that_is_built_is_not_built_again() -> None:
    engine = World().engine()
    engine.admit(1, range(8))
    pool = engine.world.pool
    native = pool.native
    begin_if_complete(pool)
    assert pool.native is native
    assert engine.lookup(range(9)) == 8


def test_a_lease_is_renewed_by_messages() -> None:
    world = World()
    silent, loud = world.engine(), world.engine()
    silent.admit(1, range(8))
    world.core.tick()
    for _ in range(4):
        world.clock.now += 10
        loud.renew()
        world.core.tick()
    with pytest.raises(SessionExpiredError):
        silent.renew()
    assert world.usage()["retired"] == 1, "until the data plane has quit it"
    world.pump()
    assert world.usage()["held"] == world.usage()["retired"] == 0
    for slept_s in (16, 31, 1000):  # more than half a lease between two ticks, and more than all
        world.after(slept_s)
        world.after(14.9)
        loud.renew()  # all leases ran anew from the tick after the sleep


def test_a_control_plane_that_slept_says_so(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.core.tick()
    world.after(14.9)
    assert "slept" not in caplog.text
    world.after(20)
    assert "this process slept late_s=12.500" in caplog.text


def test_sessions_that_expire_together_end_a_few_at_a_time() -> None:
    """So that others come between; a slow end is played by a clock that goes on with each."""
    world = World()
    engines = [world.engine() for _ in range(5)]
    end = world.core.sessions.end

    def slowly(*arguments: Any) -> None:
        end(*arguments)
        world.clock.now += 0.01

    world.core.sessions.end = slowly  # type: ignore[method-assign]
    world.clock.now += world.config.lease_s
    for num_left in (4, 3, 2, 1, 0):
        due_s = world.core.tick()
        assert len(world.core.sessions.by_id) == num_left
        assert num_left == 0 or due_s <= 0
    assert len({engine.id for engine in engines}) == 5


# What is kept of a session that ended


def test_a_fence_of_a_session_of_an_earlier_build_touches_no_later_one() -> None:
    world = World()
    before = world.engine()
    before.admit(1, range(20))
    before.close()
    world.pool.set_tiers({DEVICE: 8, HOST: 4})
    world.engine().admit(1, range(20))
    world.pump()
    assert before.id in world.shards[0].fenced
    assert world.usage()["held"] == 3
    world.core.check_integrity()


def test_why_a_session_ended_is_told_to_its_tenant_and_forgotten_in_order() -> None:
    world = World()
    ended = world.core.sessions
    ended._max_remembered = 2
    first, _, last = (world.engine("ann") for _ in range(3))
    for session in [*ended.by_id.values()]:
        ended.end(session, SessionExpiredError)
    admission: PoolAdmission = ended.admission_of(world.pool)
    assert not admission.sessions
    for engine, tenant, error in (
        (last, "ann", SessionExpiredError),
        (last, "bob", SessionNotFoundError),
        (first, "ann", SessionNotFoundError),
    ):
        assert ended.has_ended(engine.id, tenant) == (error is SessionExpiredError)
        told = ended.error(engine.id, tenant)
        assert type(told) is error
        assert told.field == "session.session_id"


# Its part of the queue


def test_the_queue_sees_what_sequences_hold() -> None:
    engine = World().engine()
    engine.admit(1, range(19))
    engine.step(ops.fork(1, 2))
    session = engine.session
    pool = engine.world.pool
    blocks = DeviceBlocks(pool, engine.world.core.sessions.by_id)
    key = session.native.family_of(session.handle, 1)
    assert blocks.num_blocks == pool.num_blocks(DEVICE)
    assert blocks.num_held(engine.id, key) >= 3, "it may be too high, but never too low"
    assert blocks.num_obtainable(engine.id) == blocks.num_blocks - 3
    assert blocks.num_pending(engine.id) == 0
    assert blocks.retired_since(engine.id) is None


def test_news_are_told_once_and_stay_for_the_answer() -> None:
    world = World()
    session = world.engine().session
    news = PoolNews()
    news.cut(session, 1, cpb.CUT_REASON_TURN)
    ((session_id, told),) = news.take_unsent()
    assert (session_id, news.take_unsent()) == (session.id, [])
    assert news.take(session) == told
    news.asked(session, columns.pack(INT64, [1]), 3, 0.5)
    assert news.take(session) is not None
    assert (news.take_unsent(), session.news) == ([], None)


def test_an_admission_that_waits_has_the_ids_of_its_forks() -> None:
    forks = columns.pack(INT64, [5, 6])
    waiting = QueuedAdmission(1, cpb.Admit(sequence_id=4, fork_sequence_ids=forks), 3, 0.0)
    assert [waiting.names(i) for i in (4, 5, 6, 7)] == [True, True, True, False]
    assert [waiting.is_of(i) for i in (4, 5)] == [True, False]
    assert not QueuedAdmission(2, None, 3, 0.0).names(4), "a swap-in has none"


# What metrics tell of them


def test_ends_of_sessions_tell_why_and_what_they_held() -> None:
    world = World()
    closed, expired = world.engine(), world.engine()
    closed.admit(1, range(16))
    expired.admit(1, range(100, 124))
    closed.close()
    world.pass_time(120)
    assert world.observed().statistics.reclaimed_blocks == {"closed": 2, "expired": 3}
    assert world.observed().statistics.num_expired_sessions == 1
    assert world.observed().oldest_release_s > 0, "the data plane was not asked to fence them yet"
    world.clock.now += 1
    world.pump()
    fence = world.observed().statistics.fence_s
    assert sum(fence.counts) == 2
    assert fence.sum > 2


def test_plans_without_receipts_age_and_new_epochs_are_counted() -> None:
    world = World()
    engine = world.engine()
    assert world.observed().oldest_plan_s == 0
    engine.step(ops.admit(1, range(16)))
    world.clock.now += 3
    assert (world.observed().num_plans_in_flight, world.observed().oldest_plan_s) == (1, 3)
    world.shards[0].restart()
    world.shards[0].come()
    assert world.observed().statistics.num_epoch_changes == 1
