"""Prefixes that are retained: how long and how strongly, and what a refusal leaves as it is. And
prefixes that are forgotten.
"""

from __future__ import annotations

import pytest

from kvplane import ops
from kvplane.errors import (
    BlockInUseError,
    QuotaExceededError,
)
from kvplane.prefixes import DEFAULT_PRIORITY, ForgetScope
from kvplane.results import ForgetResult
from kvplane.wire.plane.v1 import registration_pb2 as rpb
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
    assert await caller.retain(prompt(2), time_to_live_s=TIME_S, priority=PRIORITY) == 2
    return caller


async def priorities(caller: Caller) -> list[int]:
    return [block.priority for block in await caller.blocks(prompt(3))]


async def test_a_retention_that_is_refused_leaves_earlier_ones_as_they_are(clock, retainer) -> None:
    for time_to_live_s in (1, 10 * TIME_S):
        for more in (prompt(3), prompt(1, seed=1)):  # what follows, and another prompt
            call = retainer.retain(more, time_to_live_s=time_to_live_s, priority=100)
            await retainer.denied(call, QuotaExceededError, "token_ids")
    await retainer.refuse(ops.admit(2, prompt(8, seed=2)))
    assert await priorities(retainer) == [PRIORITY, PRIORITY, 0]
    clock.advance(TIME_S - 1)
    assert await priorities(retainer) == [PRIORITY, PRIORITY, 0], "it ends no earlier"
    clock.advance(2)
    assert await priorities(retainer) == [0, 0, 0], "and no later"


# Forgetting.


async def test_what_sequences_read_is_forgotten_only_by_force(world, caller) -> None:
    await caller.admit(1, prompt(2))
    await caller.cache(prompt(3))
    block = prompt(1, extra=0)
    await caller.denied(caller.forget(block), BlockInUseError, "token_ids")
    for scope in ForgetScope:
        await caller.denied(caller.forget(scope), BlockInUseError, "scope")
    assert await caller.num_cached(prompt(3)) == 24
    assert await caller.forget(block, force=True) == ForgetResult(3, 2)
    assert await caller.num_cached(prompt(3)) == 0
    assert (await world.usage())["held"] == 3
    await caller.grow(1, 77)
    await caller.do(ops.free(1))
    assert await world.usage() == {"free": 16, "cached": 0, "held": 0, "retired": 0}


# Without a session.


async def test_prefixes_are_kept_and_forgotten_after_their_sessions_have_ended(
    world, caller
) -> None:
    await caller.cache(prompt(2))
    await caller.session.close()
    await world.shard.send(fence_done=rpb.FenceDone(session=caller.session._ref))
    assert await caller.retain(prompt(2), time_to_live_s=TIME_S) == 2
    assert [block.priority for block in await caller.blocks(prompt(2))] == [DEFAULT_PRIORITY] * 2
    assert await caller.forget(ForgetScope.TENANT) == ForgetResult(2, 0)
    assert await caller.blocks(prompt(2)) == ()
    world.server.core.check_integrity()
