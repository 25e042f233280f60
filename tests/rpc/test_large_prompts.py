"""Prompts that no pool holds, over a socket: each is refused with the reason, and costs others
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvplane import ControlClient, ops
from kvplane.errors import QuotaExceededError
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.outcomes import outcomes
from tests.helpers.planning.operations_world import Caller, World, prompt

StartWorld = Callable[..., Awaitable[World]]

NUM_TOKENS = 10_000_000
ROOM_BYTES = 1 << 26
"""The most of a message, where such a prompt is to be read at all; by default it is not."""


@pytest.fixture(scope="module")
def token_ids() -> bytes:
    return bytes(4 * NUM_TOKENS)


@pytest.fixture
async def world(start_world: StartWorld) -> World:
    return await start_world(max_message_bytes=ROOM_BYTES)


@pytest.fixture
async def caller(world: World) -> Caller:
    return await world.caller()


async def numbers(world: World) -> list[int]:
    """The last number of each session that the control plane has answered."""
    return [each.last_number for each in await world.client.list_sessions("pool")]


async def test_a_message_over_the_limit_uses_no_number_and_changes_nothing(
    start_world: StartWorld, token_ids
) -> None:
    """Of the default limit: gRPC refuses it unread, so no field of it is named."""
    world = await start_world()
    caller = await world.caller()
    await caller.admit(1, prompt(1))
    before, sessions = world.state(), await numbers(world)
    with pytest.raises(
        QuotaExceededError,
        match=r"larger than max .*: send it in parts, or raise .* --max-message-bytes",
    ):
        await caller.session.step([ops.admit(2, token_ids)])
    assert await numbers(world) == sessions
    assert world.state() == before
    await caller.grow(1, 5)


async def test_others_are_served_while_a_large_prompt_is_refused(world, caller, token_ids) -> None:
    """They have connections of their own, as engines do."""
    async with ControlClient(world.server.address) as client:
        other = await client.open_session("pool", world.layout)
        num_steps, number = 0, caller.session.last_number
        refused = asyncio.create_task(caller.session.step([ops.admit(1, token_ids)]))
        while not refused.done():
            for operation in (ops.admit(1, prompt(1)), ops.free([1])):
                result = await other.step([operation])
                assert not result.results[0].failures
                other.add_receipt(world.shard.receipt(result.plan))
            num_steps += 1
        (outcome,) = outcomes(await refused)
        assert outcome.failures[0].status == pb.ITEM_STATUS_NEVER
        assert caller.session.last_number == number + 1
        assert num_steps > 1, "nobody was served meanwhile"
