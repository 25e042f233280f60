"""Prefixes are found, retained and forgotten without a session; forgotten ones do not come back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice

import pytest

from control_plane.pools import pool
from kvplane import ops
from kvplane.errors import PoolNotReadyError, QuotaExceededError
from kvplane.prefixes import ForgetScope
from kvplane.slices import run_to_end
from kvplane.wire.error_messages import duration_of
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import prefix_pb2 as pb
from tests.helpers.core.core_messages import BLOCK, POOL
from tests.helpers.core.core_model import World, only
from tests.helpers.planning.registration_messages import hello
from tests.helpers.refusals import refused


def retain(
    world: World,
    tenant: str,
    namespace: str,
    *,
    time_to_live_s: int = 60,
    tokens: Sequence[int] = range(17),
    priority: int = 50,
) -> int:
    """Retain a prompt; 0 s end its retention."""
    request = pb.RetainPrefixRequest(
        pool_id=POOL,
        namespace=namespace,
        token_ids=ops.pack_tokens(tokens),
        time_to_live=duration_of(time_to_live_s or None),
        priority=priority,
    )
    return world.core.retain_prefix(request, tenant).num_blocks


def test_a_prefix_is_found_by_its_very_tokens_and_by_its_tenant_alone() -> None:
    world = World()
    ann, bob = world.engine("ann"), world.engine("bob")
    ann.admit(1, range(17))
    assert ann.cached(2, range(17)) == 16
    other = [*range(7), 99, *range(8, 17)]
    assert ann.cached(3, other) == 0
    assert bob.cached(1, range(17)) == 0


def test_a_tenant_has_one_quota_over_its_namespaces_and_others_have_their_own() -> None:
    world = World(num_device=16, max_retained_share=0.125)
    owners = [("tenant", ""), ("tenant", "lora"), ("other", "")]
    for owner in owners:
        world.engine(*owner).cache(range(17))
    assert retain(world, *owners[0]) == 2
    with refused(QuotaExceededError, "token_ids"):
        retain(world, *owners[1])
    assert retain(world, *owners[2]) == 2
    assert retain(world, *owners[0], time_to_live_s=0) == 2, "it ends"
    assert retain(world, *owners[1]) == 2


def test_what_a_step_frees_goes_before_what_is_retained() -> None:
    """Its blocks are not idle before the step's plan has run."""
    world = World(num_device=4, num_host=0, max_retained_share=0.5)
    engine = world.engine()
    engine.cache(range(17))
    assert retain(world, "tenant", "") == 2
    engine.admit(2, range(100, 116))
    engine.do(ops.free([2]), ops.admit(3, [5] * 16))
    assert engine.lookup(range(17)) == 16
    assert engine.lookup(range(100, 116)) == 0


def priorities(world: World) -> list[int]:
    """Of the blocks of the prompt of 25 tokens."""
    request = pb.FindPrefixRequest(token_ids=ops.pack_tokens(range(25)), with_blocks=True)
    (found,) = run_to_end(world.core.find_prefix(request, "tenant")).matches
    return [*found.blocks.priorities]


def test_a_retention_that_is_refused_leaves_earlier_ones_as_they_are() -> None:
    world = World(num_device=8, num_host=0, max_retained_share=0.25)
    engine = world.engine()
    engine.cache(range(25))
    engine.cache(range(100, 117))
    assert retain(world, "tenant", "") == 2
    for time_to_live_s in (1, 600):
        for more in (range(25), range(100, 109)):  # what follows, and another prompt
            with refused(QuotaExceededError, "token_ids"):
                how = {"time_to_live_s": time_to_live_s, "tokens": more, "priority": 100}
                retain(world, "tenant", "", **how)
    assert only(engine.step(ops.admit(2, range(200, 265)))).failures, "the pool has 8 blocks"
    for seconds, wanted in ((0, [50, 50, 0]), (59, [50, 50, 0]), (2, [0, 0, 0])):
        world.clock.now += seconds
        assert priorities(world) == wanted


def test_a_search_of_many_pools_runs_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.prefixes._SLICE_BLOCKS", 1)
    engine = World().engine()
    engine.cache(range(17))
    for pool_id in ("a", "z"):
        engine.world.core.register(hello(pool_id=pool_id))
    request = pb.FindPrefixRequest(token_ids=ops.pack_tokens(range(17)))
    slices = engine.world.core.find_prefix(request, "tenant")
    next(slices)  # the first pool was searched
    engine.forget(ForgetScope.NAMESPACE)
    next(slices)
    with pytest.raises(StopIteration) as end:
        next(slices)
    found = {each.pool_id: each.num_device_tokens for each in end.value.value.matches}
    assert found == {"a": 0, POOL: 0, "z": 0}


@pytest.mark.parametrize(("event", "num_left"), [("eviction", 2), ("rebuild", 0)])
def test_counts_blocks_and_revision_are_of_the_moment_at_which_a_search_ends(
    event: str, num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.prefixes._SLICE_BLOCKS", 2)
    request = pb.FindPrefixRequest(token_ids=ops.pack_tokens(range(41)), with_blocks=True)
    for num_slices in count(1):
        world = World(num_device=8, num_host=0)
        engine = world.engine()
        engine.cache(range(41))
        slices = world.core.find_prefix(request, "tenant")
        if len(list(islice(slices, num_slices))) < num_slices:
            break
        if event == "eviction":
            engine.admit(2, range(100, 148))  # takes all blocks but two
        else:
            world.shards[0].restart()
            world.shards[0].come()
        (found,) = run_to_end(slices).matches
        assert (found.num_device_tokens, len(found.blocks.tiers)) == (8 * num_left, num_left)
        assert found.revision == world.pool.revision()
    assert num_slices == 3, "after two blocks, and after four"


@pytest.mark.parametrize("scope", ForgetScope)
def test_nothing_is_forgotten_before_all_shards_have_reported(scope: ForgetScope) -> None:
    world = World()
    engine = world.engine()
    engine.cache(range(17))
    world.pump()
    world.shards[0].restart()
    world.shards[0].register()
    with pytest.raises(PoolNotReadyError) as refused:
        engine.forget(scope)
    assert refused.value.retry_delay_s
    with pytest.raises(PoolNotReadyError):
        retain(world, "tenant", "")
    world.shards[0].come()
    assert retain(world, "tenant", "") == 0


# Withdrawals


def cached_world(num_shards: int = 1) -> World:
    """Two blocks of one prompt are cached, and every data plane knows it."""
    world = World(num_shards)
    world.engine().cache(range(17))
    world.pump()
    assert [len(shard.published) for shard in world.shards] == [2] * num_shards
    return world


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_control_plane_that_restarts_does_not_learn_what_was_forgotten(num_shards: int) -> None:
    world = cached_world(num_shards)
    world.engine().forget(range(8, 16), force=True)  # of no cached prefix
    world.engine().forget(range(8))
    world.pump()
    assert [len(shard.published) for shard in world.shards] == [0] * num_shards
    world.restart_control_plane()
    assert world.engine().lookup(range(17)) == 0


@pytest.mark.parametrize("is_away", [False, True])
def test_what_a_plan_evicted_that_never_ran_can_be_forgotten(is_away: bool) -> None:
    """The data plane still has it as it was, and would report it."""
    world = World(num_device=4, num_host=0)
    engine, other = world.engine(), world.engine()
    engine.cache(range(25))
    world.pump()
    if is_away:
        world.shards[0].leave()
    other.step(ops.admit(2, [5] * 4 * BLOCK, skip_prefix_lookup=True))
    other.close()
    assert engine.forget(ForgetScope.TENANT).num_forgotten_blocks == 0
    if is_away:
        assert world.shards[0].come(), "it is resumed"
    world.pump()
    assert not world.shards[0].published
    world.restart_control_plane()
    assert world.engine().lookup(range(25)) == 0


def test_what_is_published_again_under_the_same_tokens_stays() -> None:
    world = cached_world()
    engine = world.engine()
    engine.forget(range(8))
    engine.admit(1, range(17))
    engine.settle()
    world.pump()
    world.restart_control_plane()
    assert world.engine().lookup(range(17)) == 16


def test_a_data_plane_that_was_away_withdraws_when_it_resumes() -> None:
    world = cached_world()
    engine = world.engine()
    engine.admit(1, range(100, 117))
    engine.settle()
    world.pump()
    engine.forget(range(8))
    world.shards[0].leave()
    assert world.shards[0].come(), "it is resumed"
    world.pump()
    assert len(world.shards[0].published) == 2, "the other prompt's"
    world.restart_control_plane()
    assert world.engine().lookup(range(17)) == 0
    assert world.engine().lookup(range(100, 117)) == 16


@pytest.mark.parametrize(("num_shards", "is_forgetting"), [(1, False), (2, False), (1, True)])
def test_a_data_plane_that_is_not_resumed_does_not_bring_back_what_was_forgotten(
    num_shards: int, is_forgetting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left without the withdrawal, and a late copy of its first Hello registers it anew. If that
    comes while much is still being forgotten, nothing is kept.
    """
    kept = 0 if is_forgetting else 16
    world = World(num_shards)
    engine, shard = world.engine(), world.shards[0]
    first = rpb.Hello.FromString(shard.hello.SerializeToString())
    first.ClearField("key_id")
    engine.cache(range(17))
    engine.admit(1, range(100, 117))
    engine.settle()
    world.pump()
    monkeypatch.setattr(pool, "_SLICE_ENTRIES", 1 if is_forgetting else 10_000)
    engine.forget(range(8))
    for each in world.shards:
        each.leave()
    world.core.register(first)
    world.core.disconnect(*shard.key)
    assert not shard.come(), "it is resumed"
    assert all(each.come() for each in world.shards[1:])
    world.pump()
    assert world.engine().lookup(range(17)) == 0
    assert world.engine().lookup(range(100, 117)) == kept
    world.pump()
    assert [len(shard.published) for shard in world.shards] == [kept // 8] * num_shards
    world.restart_control_plane()
    assert world.engine().lookup(range(17)) == 0
    assert world.engine().lookup(range(100, 117)) == kept


def test_blocks_in_use_are_withdrawn_when_they_are_forgotten_by_force() -> None:
    world = cached_world()
    engine = world.engine()
    engine.admit(1, range(17))
    engine.settle()
    engine.forget(range(8), force=True)
    world.pump()
    assert not world.shards[0].published
    world.restart_control_plane()
    assert world.engine().lookup(range(17)) == 0


def test_a_block_in_use_that_was_forgotten_is_not_written_in_place() -> None:
    """The data plane may hear of the next plan before it hears that the block is forgotten."""
    world = cached_world()
    engine = world.engine()
    engine.admit(1, range(17))
    engine.do(ops.truncate([1], [12]))
    before = engine.table(1)
    engine.forget(ForgetScope.NAMESPACE, force=True)
    for position in (12, 13):
        engine.do(ops.append(1, [7], 1, first_positions=position))
        assert engine.table(1)[0] == before[0] and engine.table(1)[1] != before[1]
    world.core.check_integrity()


def test_a_large_prefix_is_taken_apart_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_SLICE_ENTRIES", 1)
    world = cached_world()
    engine = world.engine()
    engine.forget(range(8))
    assert engine.lookup(range(17)) == 0, "it is not found at once"
    world.core.take_notified()
    assert world.core.has_work()
    world.work()
    assert world.usage()["cached"] == 0
    world.pump()
    assert not world.shards[0].published
