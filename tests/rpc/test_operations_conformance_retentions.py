"""Retentions that are refused, over a socket: those before them keep their priority and time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from kvplane import ops
from kvplane.errors import InvalidRequestError, QuotaExceededError
from tests.helpers.planning.operations_world import Caller, StoppedClock, World, prompt

StartWorld = Callable[..., Awaitable[World]]

TIME_S, PRIORITY = 60, 90


@pytest.fixture
async def world(start_world: StartWorld) -> World:
    """Of whose eight blocks two may be retained."""
    return await start_world(num_device_blocks=8, num_host_blocks=0)


@pytest.fixture
async def clock(world: World) -> StoppedClock:
    return world.stop_clock()


@pytest.fixture
async def caller(world: World, clock: StoppedClock) -> Caller:
    """Three blocks of a prompt are cached and two of another; of the first two are retained."""
    caller = await world.caller()
    for token_ids in (prompt(3), prompt(2, seed=1)):
        await caller.admit(1, token_ids)
        await caller.do(ops.free([1]))
    await caller.do(ops.retain(prompt(2), time_to_live_s=TIME_S, priority=PRIORITY))
    return caller


async def priorities(caller: Caller) -> list[int]:
    return [block.priority for block in await caller.session.explain_prefix(prompt(3))]


@pytest.mark.parametrize("time_to_live_s", [1, 10 * TIME_S], ids=["shorter", "longer"])
@pytest.mark.parametrize(
    "token_ids", [prompt(3), prompt(1, seed=1)], ids=["what follows", "another prompt"]
)
async def test_a_retention_over_the_quota_leaves_earlier_ones_as_they_are(
    clock, caller, token_ids, time_to_live_s
) -> None:
    more = ops.retain(token_ids, time_to_live_s=time_to_live_s, priority=100)
    await caller.fail(more, QuotaExceededError, "token_ids")
    assert await priorities(caller) == [PRIORITY, PRIORITY, 0]
    clock.advance(TIME_S - 1)
    assert await priorities(caller) == [PRIORITY, PRIORITY, 0]
    clock.advance(2)
    assert await priorities(caller) == [0, 0, 0]


async def test_a_prefix_that_is_retained_again_is_kept_no_shorter_and_no_lower(
    clock, caller
) -> None:
    """Another engine of the tenant may have asked for it first."""
    await caller.do(ops.retain(prompt(2), time_to_live_s=1, priority=100))
    await caller.do(ops.retain(prompt(2), time_to_live_s=2 * TIME_S, priority=10))
    for passed_s, priority in ((0, 100), (2, PRIORITY), (TIME_S, 10), (TIME_S, 0)):
        clock.advance(passed_s)
        assert await priorities(caller) == [priority, priority, 0]


async def test_a_retention_that_is_wrong_leaves_the_one_it_repeats_as_it_is(clock, caller) -> None:
    for operation, field in (
        (ops.retain(prompt(2), time_to_live_s=10 * TIME_S, priority=101), "priority"),
        (ops.retain(prompt(2), time_to_live_s=-1, priority=1), "time_to_live"),
        (ops.retain([*prompt(2), -1], time_to_live_s=1), "token_ids"),
    ):
        await caller.fail(operation, InvalidRequestError, field)
    clock.advance(TIME_S - 1)
    assert await priorities(caller) == [PRIORITY, PRIORITY, 0]
    clock.advance(2)
    assert await priorities(caller) == [0, 0, 0]


async def test_what_else_is_refused_leaves_retentions_as_they_are(clock, caller) -> None:
    await caller.never(ops.admit(2, prompt(8, seed=2)))
    await caller.fail(ops.forget(prompt(1)), InvalidRequestError, "token_ids")
    await caller.admit(2, prompt(3, seed=3, extra=0))
    shortage = await caller.later(ops.admit(3, prompt(6, seed=4, extra=0)))
    assert shortage.num_blocks_available == 5, "what is retained is not kept from a sequence"
    assert await priorities(caller) == [PRIORITY, PRIORITY, 0]
