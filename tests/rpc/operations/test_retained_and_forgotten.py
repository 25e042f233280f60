"""Prefixes that are retained: how long and how strongly, and what a refusal leaves as it is. And
prefixes that are forgotten.
"""

from __future__ import annotations

import pytest

from kvplane import ops
from kvplane.errors import (
    BlockInUseError,
    InvalidRequestError,
    QuotaExceededError,
)
from kvplane.prefixes import DEFAULT_PRIORITY, ForgetScope
from kvplane.results import ForgetResult
from kvplane.transport.connection import typed_errors
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import prefix_pb2 as pb
from tests.helpers.planning.operations_world import POOL, Caller, StoppedClock, World, prompt

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


LONG = prompt(2)
INVALID = {
    "no tokens": (lambda c: c.retain([], time_to_live_s=1), "token_ids"),
    "a negative token": (lambda c: c.retain([*LONG, -1], time_to_live_s=1), "token_ids"),
    "part of a token": (lambda c: c.retain(bytes(7), time_to_live_s=1), "token_ids"),
    "no tokens, at the end": (lambda c: c.retain([], time_to_live_s=None), "token_ids"),
    "no time": (lambda c: c.retain(LONG, time_to_live_s=0), "time_to_live"),
    "negative time": (lambda c: c.retain(LONG, time_to_live_s=-1), "time_to_live"),
    "priority 0": (lambda c: c.retain(LONG, time_to_live_s=1, priority=0), "priority"),
    "priority 101": (lambda c: c.retain(LONG, time_to_live_s=1, priority=101), "priority"),
    "forget no tokens": (lambda c: c.forget([]), "token_ids"),
    "forget part of a block": (lambda c: c.forget(prompt(1, extra=0)[:7]), "token_ids"),
    "forget more than a block": (lambda c: c.forget(prompt(1)), "token_ids"),
    "forget a negative token": (lambda c: c.forget([*range(7), -1]), "token_ids"),
}


@pytest.mark.parametrize("why", INVALID)
async def test_a_wrong_request_is_refused_by_its_field(retainer, why) -> None:
    call, field = INVALID[why]
    await retainer.denied(call(retainer), InvalidRequestError, field)


LATER = pb.ForgetScope.ValueType(9)
WRONG = {
    "no scope": (pb.ForgetPrefixesRequest(pool_id=POOL), "scope"),
    "an unknown scope": (pb.ForgetPrefixesRequest(pool_id=POOL, scope=LATER), "scope"),
    "tokens of a namespace": (
        pb.ForgetPrefixesRequest(
            pool_id=POOL, scope=pb.FORGET_SCOPE_NAMESPACE, token_ids=ops.pack_tokens(range(8))
        ),
        "token_ids",
    ),
    "a long namespace": (
        pb.ForgetPrefixesRequest(
            pool_id=POOL, scope=pb.FORGET_SCOPE_NAMESPACE, namespace="n" * 129
        ),
        "namespace",
    ),
    "no pool": (pb.ForgetPrefixesRequest(scope=pb.FORGET_SCOPE_TENANT), "pool_id"),
}


@pytest.mark.parametrize("why", WRONG)
async def test_what_the_client_cannot_send_is_refused_too(world, caller, why) -> None:
    await caller.cache(prompt(2))
    request, field = WRONG[why]

    async def forget() -> None:
        with typed_errors():
            await world.stub.ForgetPrefixes(request)

    await caller.denied(forget(), InvalidRequestError, field)


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
    await world.shard.send(fence_done=rpb.FenceDone(session=caller.session.ref))
    assert await caller.retain(prompt(2), time_to_live_s=TIME_S) == 2
    assert [block.priority for block in await caller.blocks(prompt(2))] == [DEFAULT_PRIORITY] * 2
    assert await caller.forget(ForgetScope.TENANT) == ForgetResult(2, 0)
    assert await caller.blocks(prompt(2)) == ()
    world.server.core.check_integrity()
