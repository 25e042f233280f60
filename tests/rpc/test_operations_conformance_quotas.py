"""What a tenant may have, over a socket: blocks, sequences, sessions and steps a second. It is
refused with the reason before any work is done, and a refusal changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from operations_world import World, prompt

from kvplane import ops
from kvplane.errors import QuotaExceededError
from kvplane.v1 import control_pb2 as pb

StartWorld = Callable[..., Awaitable[World]]


async def test_a_tenant_has_only_so_many_sessions(start_world: StartWorld) -> None:
    world = await start_world(max_tenant_sessions=2)
    first, _ = [await world.caller() for _ in range(2)]
    before = await world.client.describe_pool("pool")
    with pytest.raises(QuotaExceededError):
        await world.caller()
    assert await world.client.describe_pool("pool") == before
    await first.session.close()
    world.callers.remove(first)
    async with asyncio.timeout(10):  # until the data plane has fenced it, it counts
        answer = await world.shard.receive()
        await world.shard.send(fence_done=pb.FenceDone(session=answer.fence.session))
        while True:
            try:
                await world.caller()
                break
            except QuotaExceededError:
                await asyncio.sleep(0.01)


async def test_a_tenant_has_only_so_many_sequences_in_all_its_sessions(
    start_world: StartWorld,
) -> None:
    world = await start_world(max_tenant_sequences=3)
    one, other = [await world.caller() for _ in range(2)]
    await one.admit(1, prompt(1))
    await other.admit(1, prompt(1))
    await other.do(ops.fork(1, 2))
    for operation, field in (
        (ops.admit(2, prompt(1)), "sequence_id"),
        (ops.fork(1, 2), "sequence_ids[0]"),
    ):
        await one.fail(operation, QuotaExceededError, field)
    await other.do(ops.free([2]))
    await one.fail(
        ops.admit(2, prompt(1), fork_sequence_ids=[3]), QuotaExceededError, "sequence_id"
    )
    await one.do(ops.fork(1, 2))


async def test_a_tenant_makes_only_so_many_steps_a_second(start_world: StartWorld) -> None:
    """A step refused so has used no number, and says when to come again."""
    world = await start_world(max_tenant_steps_per_s=20.0)
    caller = await world.caller()
    refused: list[QuotaExceededError] = []
    num_steps = 0
    async with asyncio.timeout(20):
        while not refused:
            try:
                await caller.session.step([])
                num_steps += 1
            except QuotaExceededError as error:
                refused.append(error)
    assert 1 <= num_steps <= 200
    assert refused[0].retry_delay_s is not None
    await asyncio.sleep(refused[0].retry_delay_s)
    number = caller.session.last_number
    await caller.session.step([])
    assert caller.session.last_number == number
