"""Registration, leases and ends of sessions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_data_plane import LAYOUT, pack
from core_model import World

from control_plane.blocks import prefix_index
from control_plane.blocks.prefix_index import chained_hash
from control_plane.planning import recovery
from control_plane.planning.model import Fence, PublishBlocks, Tier
from kvplane.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    PoolNotFoundError,
    PoolNotReadyError,
    SessionExpiredError,
    SessionNotFoundError,
    StaleEpochError,
    StaleIncarnationError,
)


def test_a_pool_is_ready_when_all_its_shards_have_reported() -> None:
    world = World(num_shards=2)
    core = world.core
    world.shards[1].restart()
    core.register(world.shards[1].hello())
    with pytest.raises(PoolNotReadyError) as refused:
        world.engine()
    assert refused.value.retry_delay_s is not None
    world.shards[1].join()
    world.engine()
    world.shards[0].leave()
    with pytest.raises(PoolNotReadyError):
        world.engine()
    with pytest.raises(PoolNotFoundError):
        core.describe_pool("other")


def test_a_pool_has_as_many_blocks_as_its_smallest_shard() -> None:
    world = World(num_shards=2, num_device=9)
    world.shards[1].restart()
    world.shards[1].sizes = dict.fromkeys(world.shards[1].sizes, 5)
    world.shards[1].join()
    assert world.engine().opened.num_device_blocks == 5


def test_a_wrong_hello_is_refused_and_names_its_field() -> None:
    world = World(num_shards=2)
    hello = world.shards[0].hello()
    group = replace(LAYOUT.groups[0], layers=(2,), name="second")
    two_groups = replace(LAYOUT, groups=(*LAYOUT.groups, group))
    with pytest.raises(InvalidRequestError, match=r"hello\.layout\.groups"):
        world.core.register(replace(hello, layout=two_groups))
    with pytest.raises(LayoutMismatchError):
        world.core.register(replace(hello, epoch=9, layout=replace(LAYOUT, model_id="other")))
    with pytest.raises(StaleIncarnationError):
        world.core.register(replace(hello, incarnation=2))
    with pytest.raises(InvalidRequestError, match="num_device_blocks"):
        world.core.register(replace(hello, num_device_blocks=0))
    world.engine()


def test_a_shard_that_comes_back_hears_all_it_may_have_missed() -> None:
    world = World()
    engine, other = world.engine(), world.engine()
    engine.admit(1, range(16))
    other.close()
    world.shards[0].leave()
    assert world.shards[0].join(), "same epoch and incarnation: resumed"
    messages = world.core.take_outgoing("pool", 0)
    assert Fence(other.id) in messages
    published = [m for m in messages if isinstance(m, PublishBlocks)]
    assert sum(len(m.publications) for m in published) == 2
    assert engine.append(1, 16).plan is not None, "sessions go on"


def test_an_ended_sessions_callers_hear_why() -> None:
    world = World()
    closed, expired = world.engine(), world.engine()
    closed.close()
    closed.close()
    with pytest.raises(SessionNotFoundError):
        closed.renew()
    world.clock.now += 31
    world.core.tick()
    with pytest.raises(SessionExpiredError):
        expired.renew()
    killed = world.engine()
    with pytest.raises(SessionNotFoundError):
        world.core.renew_session(killed.id, "someone else")
    with pytest.raises(SessionNotFoundError):
        world.core.close_session(killed.id, "someone else")
    world.shards[0].restart()
    world.shards[0].join()
    with pytest.raises(StaleEpochError):
        killed.renew()


def test_blocks_of_an_ended_session_wait_for_every_shard() -> None:
    world = World(num_shards=2)
    engine = world.engine()
    engine.admit(1, range(20))
    engine.close()
    assert world.usage()["limbo"] == 3
    world.shards[0].pump()
    assert world.usage()["limbo"] == 3
    world.shards[1].pump()
    assert world.usage()["limbo"] == 0
    assert world.usage()["cached"] == 2


def test_session_ids_go_on_above_those_that_data_planes_have_seen() -> None:
    world = World()
    for _ in range(5):
        engine = world.engine()
    engine.admit(1, range(4))
    world.restart_control_plane()
    assert world.engine().id > engine.id


def test_a_report_is_believed_only_where_shards_agree_and_chains_are_whole() -> None:
    world = World(num_shards=2)
    engine = world.engine()
    engine.admit(1, range(32))
    world.pump()
    second = engine.table(1)[1][1]
    del world.shards[1].published[second]
    world.restart_control_plane()
    engine = world.engine()
    assert engine.cached(1, range(32)) == 8
    world.core.check_integrity()


def test_equal_hashes_join_nothing_also_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, end = pack([1] * 8), pack([2] * 8), pack([3] * 8)

    def weak_hash(parent_hash: bytes, tokens: bytes) -> bytes:
        return chained_hash(parent_hash, one if tokens == two else tokens)

    monkeypatch.setattr(prefix_index, "chained_hash", weak_hash)
    monkeypatch.setattr(recovery, "chained_hash", weak_hash)
    world = World()
    engine = world.engine()
    engine.admit(1, [1] * 8 + [3] * 8 + [0])
    engine.admit(2, [2] * 8 + [0])
    for message in world.core.take_outgoing("pool", 0):
        assert isinstance(message, PublishBlocks)
        published = {p.block.index: p for p in message.publications}
        world.shards[0].published.update(published)
    world.restart_control_plane()
    engine = world.engine()

    def num_cached(*blocks: bytes) -> int:
        prompt = b"".join(blocks) + pack([0])
        return world.core.lookup_prefix(engine.id, engine.tenant, prompt).num_cached_tokens

    assert num_cached(one, end) == 8, "whose child it is can not be told"
    assert num_cached(two, end) == 8
    world.core.check_integrity()


def test_a_generation_is_never_given_twice_though_a_shard_comes_back_smaller_for_a_while() -> None:
    world = World(num_shards=2, num_device=4)
    world.engine().admit(1, range(32))
    for num_blocks in (2, 4):
        world.shards[1].restart()
        world.shards[1].sizes[Tier.DEVICE] = num_blocks
        world.shards[1].join()
        world.pump()
    world.engine().admit(1, range(32))  # the shard that went on refuses generations it has seen
    world.core.check_integrity()


def test_a_control_plane_that_slept_says_so(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.core.tick()
    world.clock.now += 14.9
    world.core.tick()
    assert "slept" not in caplog.text
    world.clock.now += 20
    world.core.tick()
    assert "this process slept late_s=12.500" in caplog.text
