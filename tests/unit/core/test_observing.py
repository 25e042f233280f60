"""What pools tell of themselves for metrics."""

from __future__ import annotations

from control_plane.observing import PoolObservation
from control_plane.pools.statistics import PoolStatistics
from kvplane import ops
from tests.helpers.core.core_messages import BLOCK, POOL
from tests.helpers.core.core_model import Engine, World


def prompt(num_blocks: int, seed: int = 0) -> list[int]:
    return [1000 * (seed + 1) + i for i in range(num_blocks * BLOCK)]


def told(world: World) -> PoolObservation:
    return world.core.observe_pool(POOL)


def counted(world: World) -> PoolStatistics:
    return told(world).statistics


def pass_time(world: World, seconds: float, *engines: Engine) -> None:
    """In steps so short that nothing concludes that the process slept; the engines live."""
    world.core.tick()
    for _ in range(round(seconds / 0.25)):
        world.clock.now += 0.25
        world.core.tick()
        for engine in engines:
            engine.renew()


def test_waiting_admissions_are_counted_and_their_wait_is_measured() -> None:
    world = World(num_device=8, num_host=0)
    one, other = world.engine(), world.engine()
    one.admit(1, prompt(7))
    other.step(ops.admit(5, prompt(3, 1), wait=True))
    assert told(world).num_waiting == 1
    pass_time(world, 1.0, one, other)
    one.send(ops.free([1]))
    one.settle()
    assert told(world).num_waiting == 0
    wait = counted(world).wait_s
    assert (sum(wait.counts), wait.sum) == (1, 1.0)


def test_what_a_sequence_that_was_cut_reads_again_is_counted_apart() -> None:
    world = World(num_device=8, num_host=0)
    one, other = world.engine(), world.engine()
    one.admit(1, prompt(7))
    other.step(ops.admit(5, prompt(3, 1), wait=True))
    pass_time(world, 40, one, other)
    assert counted(world).cut_sequences.total() == 1
    one.step(ops.free([]))  # hears of it
    one.run_all()
    one.settle()
    other.step()  # is granted its admission
    other.send(ops.free([5]))
    other.settle()
    one.step(ops.admit(1, prompt(7)))
    assert counted(world).reread_lookup_tokens == 7 * BLOCK
    assert counted(world).reread_hit_tokens > 0


def test_ends_of_sessions_tell_why_and_what_they_held() -> None:
    world = World()
    closed, expired = world.engine(), world.engine()
    closed.admit(1, prompt(2))
    expired.admit(1, prompt(3, 1))
    closed.close()
    pass_time(world, 120)
    assert counted(world).reclaimed_blocks == {"closed": 2, "expired": 3}
    assert counted(world).num_expired_sessions == 1
    assert told(world).oldest_release_s > 0, "the data plane was not asked to fence them yet"
    world.clock.now += 1
    world.pump()
    fence = counted(world).fence_s
    assert sum(fence.counts) == 2
    assert fence.sum > 2


def test_plans_without_receipts_age_and_new_epochs_are_counted() -> None:
    world = World()
    engine = world.engine()
    assert told(world).oldest_plan_s == 0
    engine.step(ops.admit(1, prompt(2)))
    world.clock.now += 3
    assert (told(world).num_plans_in_flight, told(world).oldest_plan_s) == (1, 3)
    world.shards[0].restart()
    world.shards[0].join()
    assert counted(world).num_epoch_changes == 1
