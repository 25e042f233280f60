"""The feed of a pool's prefix index: whoever follows it has what the pool has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import grpc.aio
import pytest

from control_plane import limits
from control_plane.server.server import ControlPlaneServer
from kvplane import ControlClient, ops
from kvplane.errors import RevisionTooOldError
from kvplane.prefixes import (
    BlocksRemoved,
    BlocksStored,
    ForgetScope,
    IndexCleared,
    PrefixEvent,
    StoredBlock,
)
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.v1 import prefix_pb2 as pb
from tests.helpers.planning.control_wire import Stub
from tests.helpers.planning.operations_world import DEVICE, POOL, Caller, World, prompt
from tests.helpers.waiting import until

Held = dict[tuple[bytes, int], StoredBlock]


class Follower:
    """What a pool has cached, by its feed."""

    def __init__(self) -> None:
        self.held: Held = {}
        self.revision = -1
        self.num_snapshots = 0

    def apply(self, event: PrefixEvent) -> None:
        if isinstance(event, IndexCleared):
            self.held.clear()
            self.num_snapshots += 1
            self.revision = -1
        elif isinstance(event, BlocksStored):
            for block in event.blocks:
                self.held[block.block_hash, block.tier] = block
        elif isinstance(event, BlocksRemoved):
            for key in event.blocks:
                self.held.pop(key, None)
        else:
            assert event.revision >= self.revision
            self.revision = event.revision

    async def until(self, revision: int) -> None:
        await until(lambda: self.revision >= revision)


@asynccontextmanager
async def following(client: ControlClient, namespace: str = "") -> AsyncIterator[Follower]:
    follower = Follower()

    async def run() -> None:
        async with aclosing(client.watch_prefixes(POOL, namespace)) as events:
            async for event in events:
                follower.apply(event)

    task = asyncio.create_task(run())
    try:
        yield follower
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):  # but not what ended it before
            await task


async def revision_of(caller: Caller) -> int:
    return (await caller.step()).revision


async def test_a_snapshot_has_what_is_cached_and_changes_follow(world, caller) -> None:
    adapter = await world.caller("lora-7")
    await caller.admit(1, prompt(2))
    async with following(world.client) as follower, following(world.client, "lora-7") as other:
        await follower.until(await revision_of(caller))
        hashes = [block.block_hash for block in await caller.blocks(prompt(2))]
        assert [block_hash for block_hash, _ in follower.held] == hashes
        first, second = follower.held.values()
        assert (first.parent_hash, second.parent_hash) == (bytes(16), first.block_hash)
        assert [*first.token_ids, *second.token_ids] == prompt(2, extra=0)
        assert {tier for _, tier in follower.held} == {DEVICE}
        await adapter.admit(1, prompt(1))
        await other.until(await revision_of(adapter))
        await caller.admit(2, prompt(3))
        await follower.until(await revision_of(caller))
        assert len(follower.held) == 3
        assert len(other.held) == 1, "of its own namespace alone"
        await caller.do(ops.free([1, 2]))
        await caller.forget(prompt(3, extra=0))
        await follower.until(await revision_of(caller))
        assert len(follower.held) == 2
        assert follower.num_snapshots == 1
        await caller.forget(ForgetScope.NAMESPACE)
        await follower.until(await revision_of(caller))
        assert (len(follower.held), len(other.held)) == (0, 1)


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
    await caller.admit(1, prompt(2))
    async with following(world.client) as follower:
        await follower.until(1)
        address = world.server.address
        await world.server.stop()
        successor = await start_control_plane(bind=address, watermark=0.0)
        fresh = World(successor, world.client, connect(successor))
        async with asyncio.timeout(10):
            shard = await fresh.register()
        again = await fresh.caller()
        await again.admit(1, prompt(1, seed=1))
        await until(lambda: len(follower.held) == 1)
        assert follower.num_snapshots >= 2
        shard.hang_up()
