"""The feed of a pool's prefix index: whoever follows it has what the pool has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import grpc.aio
import pytest

from control_plane import limits
from control_plane.server.server import ControlPlaneServer
from kvplane import ops
from kvplane.errors import RevisionTooOldError
from kvplane.prefixes import (
    BlocksRemoved,
    BlocksStored,
    IndexCleared,
)
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.v1 import prefix_pb2 as pb
from tests.helpers.planning.control_wire import Stub
from tests.helpers.planning.operations_world import POOL, Caller, World, prompt
from tests.helpers.waiting import until


@pytest.fixture
def four_changes(monkeypatch) -> None:
    """Pools keep four changes."""
    monkeypatch.setattr(limits, "NUM_KEPT_CHANGES", 4)


async def test_a_follower_that_is_overrun_is_told_so_on_its_stream(four_changes, world) -> None:
    """One step changes more than is kept."""
    caller = await world.caller()
    call = world.stub.WatchPrefixes(pb.WatchPrefixesRequest(pool_id=POOL))
    while not (await asyncio.wait_for(call.read(), 10)).revision:
        pass
    await caller.admit(1, prompt(5))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await asyncio.wait_for(call.read(), 10)
    assert type(from_rpc_error(ended.value)) is RevisionTooOldError


async def test_a_follower_outlives_its_control_plane(
    world: World,
    caller: Caller,
    start_control_plane: Callable[..., Awaitable[ControlPlaneServer]],
    connect: Callable[[ControlPlaneServer], Stub],
) -> None:
    """It has a snapshot of each, and the changes since."""
    await caller.admit(1, prompt(1))
    held: set[bytes] = set()
    num_snapshots = 0

    async def follow() -> None:
        nonlocal num_snapshots
        async with aclosing(world.client.watch_prefixes(POOL)) as events:
            async for event in events:
                if isinstance(event, IndexCleared):
                    held.clear()
                    num_snapshots += 1
                elif isinstance(event, BlocksStored):
                    held.update(block.block_hash for block in event.blocks)
                elif isinstance(event, BlocksRemoved):
                    held.difference_update(block_hash for block_hash, _ in event.blocks)

    following = asyncio.create_task(follow())
    await until(lambda: len(held) == 1)
    await caller.admit(2, prompt(3))
    await until(lambda: len(held) == 3)
    await caller.do(ops.free([1, 2]))
    await caller.forget(prompt(2, extra=0))
    await until(lambda: len(held) == 1)
    assert num_snapshots == 1
    await world.server.stop()
    successor = await start_control_plane(bind=world.server.address, watermark=0.0)
    fresh = World(successor, world.client, connect(successor))
    async with asyncio.timeout(10):
        shard = await fresh.register()
    again = await fresh.caller()
    await again.admit(1, prompt(2, seed=1))
    await until(lambda: len(held) == 2)
    assert num_snapshots >= 2
    following.cancel()
    shard.hang_up()
