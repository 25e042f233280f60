"""Prefixes that are retained: how long and how strongly, and what a refusal leaves as it is. And
prefixes that are forgotten.
"""

from __future__ import annotations

import pytest

from kvplane import ops
from kvplane.errors import BlockInUseError, InvalidRequestError, QuotaExceededError
from tests.helpers.planning.operations_world import Caller, StoppedClock, World, prompt

TIME_S, PRIORITY = 60, 90


@pytest.fixture
async def small(start_world) -> World:
    """A pool of eight blocks, of which two may be retained."""
    return await start_world(num_device_blocks=8, num_host_blocks=0)


@pytest.fixture
async def clock(small: World) -> StoppedClock:
    return small.stop_clock()


@pytest.fixture
async def retainer(small: World, clock: StoppedClock) -> Caller:
    """Three blocks of a prompt are cached and two of another; of the first two are retained."""
    caller = await small.caller()
    await caller.cache(prompt(3))
    await caller.cache(prompt(2, seed=1))
    await caller.do(ops.retain(prompt(2), time_to_live_s=TIME_S, priority=PRIORITY))
    return caller


async def priorities(caller: Caller) -> list[int]:
    return [block.priority for block in await caller.session.explain_prefix(prompt(3))]


async def test_what_is_retained_is_evicted_last_but_never_kept_from_a_sequence(retainer) -> None:
    await retainer.admit(1, prompt(6, seed=3, extra=0))
    assert await retainer.num_cached(prompt(2)) == 16
    assert await retainer.num_cached(prompt(2, seed=1)) == 0
    shortage = await retainer.later(ops.admit(2, prompt(3, seed=4, extra=0)))
    assert shortage.num_blocks_available == 2
    await retainer.admit(2, prompt(2, seed=4, extra=0))
    assert await retainer.num_cached(prompt(2)) == 0


async def test_a_release_makes_room_for_another_retention(retainer) -> None:
    """What is not cached counts as nothing."""
    another = ops.retain(prompt(3, seed=1), time_to_live_s=TIME_S)
    await retainer.fail(another, QuotaExceededError, "token_ids")
    for num_released in (2, 0):
        released = await retainer.do(ops.release(prompt(2)))
        assert released.results[0].release.num_released_blocks == num_released
    assert await priorities(retainer) == [0, 0, 0]
    kept = await retainer.do(another)
    assert kept.plan is None
    assert kept.results[0].retain.num_retained_blocks == 2
    blocks = await retainer.session.explain_prefix(prompt(2, seed=1))
    assert [block.priority for block in blocks] == [ops.DEFAULT_PRIORITY] * 2


async def test_a_retention_that_is_refused_leaves_earlier_ones_as_they_are(clock, retainer) -> None:
    for time_to_live_s in (1, 10 * TIME_S):
        for more in (prompt(3), prompt(1, seed=1)):  # what follows, and another prompt
            operation = ops.retain(more, time_to_live_s=time_to_live_s, priority=100)
            await retainer.fail(operation, QuotaExceededError, "token_ids")
    for operation, field in (
        (ops.retain(prompt(2), time_to_live_s=10 * TIME_S, priority=101), "priority"),
        (ops.retain(prompt(2), time_to_live_s=-1, priority=1), "time_to_live"),
        (ops.retain([*prompt(2), -1], time_to_live_s=1), "token_ids"),
        (ops.forget(prompt(1)), "token_ids"),
    ):
        await retainer.fail(operation, InvalidRequestError, field)
    await retainer.never(ops.admit(2, prompt(8, seed=2)))
    assert await priorities(retainer) == [PRIORITY, PRIORITY, 0]
    clock.advance(TIME_S - 1)
    assert await priorities(retainer) == [PRIORITY, PRIORITY, 0], "it ends no earlier"
    clock.advance(2)
    assert await priorities(retainer) == [0, 0, 0], "and no later"


# Forgetting.


async def test_a_prefix_is_forgotten_with_all_that_follows_it(world, caller) -> None:
    await caller.cache(prompt(3))
    await caller.cache([*prompt(1, extra=0), *prompt(2, seed=1)])
    await caller.cache(prompt(2, seed=2))
    result = await caller.do(ops.forget(prompt(2, extra=0)))
    assert result.results[0].forget.num_forgotten_blocks == 2
    assert await caller.num_cached(prompt(3)) == 8
    result = await caller.do(ops.forget(prompt(1, extra=0)))
    assert result.results[0].forget.num_forgotten_blocks == 3
    assert await caller.num_cached(prompt(3)) == 0
    assert await caller.num_cached(prompt(2, seed=2)) == 16
    assert (await world.usage())["free"] == 14
    assert (await world.counters())["forgotten_blocks_total"] == 5


async def test_what_sequences_read_is_forgotten_only_by_force(world, caller) -> None:
    await caller.admit(1, prompt(2))
    await caller.cache(prompt(3))
    forget = ops.forget(prompt(1, extra=0))
    await caller.fail(forget, BlockInUseError, "token_ids")
    for scope in ops.Scope:
        await caller.fail(ops.forget(scope), BlockInUseError, f"{scope.value}_contents")
    assert await caller.num_cached(prompt(3)) == 24
    forced = await caller.do(ops.forget(prompt(1, extra=0), force=True))
    assert forced.results[0].forget.num_forgotten_blocks == 3
    assert forced.results[0].forget.num_blocks_in_use == 2
    assert await caller.num_cached(prompt(3)) == 0
    assert (await world.usage())["held"] == 3
    await caller.grow(1, 77)
    await caller.do(ops.free(1))
    assert await world.usage() == {"free": 16, "cached": 0, "held": 0, "retired": 0}


@pytest.mark.parametrize("scope", ops.Scope)
async def test_all_of_a_namespace_or_a_tenant_is_forgotten(world, caller, scope) -> None:
    adapter = await world.caller("lora-7")
    await caller.cache(prompt(2))
    await adapter.cache(prompt(3))
    forgotten = (await adapter.do(ops.forget(scope))).results[0].forget
    assert await adapter.num_cached(prompt(3)) == 0
    is_tenant = scope is ops.Scope.TENANT
    assert forgotten.num_forgotten_blocks == (5 if is_tenant else 3)
    assert await caller.num_cached(prompt(2)) == (0 if is_tenant else 16)
