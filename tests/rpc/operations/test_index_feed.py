"""The feed of a pool's prefix index: whoever follows it has what the pool has."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import grpc.aio
import pytest

from control_plane import limits
from control_plane.server.server import ControlPlaneServer
from kvplane import ControlClient, ops
from kvplane.errors import BlockInUseError, PoolNotFoundError, RevisionTooOldError
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
from tests.helpers.planning.cached_prefixes import snapshot
from tests.helpers.planning.control_wire import Stub
from tests.helpers.planning.operations_world import DEVICE, POOL, Caller, World, prompt

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
        async with asyncio.timeout(10):
            while self.revision < revision:
                await asyncio.sleep(0.005)


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


async def churn(world: World, callers: list[Caller], rng: random.Random) -> None:
    for _ in range(40):
        caller = rng.choice(callers)
        tokens = prompt(rng.randrange(1, 6), seed=rng.randrange(8))
        result = await caller.step(ops.admit(1, tokens))
        if not result.results[0].failures:
            await caller.step(ops.free(1))
        if rng.random() < 0.1:
            with suppress(BlockInUseError):
                await caller.forget(ForgetScope.NAMESPACE)


async def test_a_feed_goes_on_from_a_revision_of_the_same_run(world, caller) -> None:
    await caller.admit(1, prompt(2))
    since = await revision_of(caller)
    async with following(world.client) as follower:  # changes are kept from now on
        await follower.until(since)
    await caller.admit(2, prompt(1, seed=1))
    request = pb.WatchPrefixesRequest(
        pool_id=POOL, since_revision=since, incarnation=world.server.core.incarnation
    )
    call = world.stub.WatchPrefixes(request)
    answer = await asyncio.wait_for(call.read(), 10)
    (event,) = answer.events
    assert (event.kind, len(event.hashes)) == (pb.PREFIX_EVENT_KIND_STORED, 16)
    assert answer.revision == await revision_of(caller)
    call.cancel()
    request.incarnation = 1
    assert (await refusal(world, request)).field == "since_revision"


async def refusal(world: World, request: pb.WatchPrefixesRequest) -> RevisionTooOldError:
    """Return why the feed ends at once."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asyncio.wait_for(world.stub.WatchPrefixes(request).read(), 10)
    assert refused.value.code() is grpc.StatusCode.ABORTED
    error = from_rpc_error(refused.value)
    assert type(error) is RevisionTooOldError
    return error


@pytest.fixture
def four_changes(monkeypatch) -> None:
    """Pools keep four changes."""
    monkeypatch.setattr(limits, "NUM_KEPT_CHANGES", 4)


async def test_a_follower_that_comes_back_too_late_is_told_to_start_again(
    four_changes, world
) -> None:
    caller = await world.caller()
    async with following(world.client) as follower:
        await caller.admit(1, prompt(1))
        await follower.until(await revision_of(caller))
        since = follower.revision
    incarnation = world.server.core.incarnation
    for seed in range(1, 6):
        await caller.admit(1 + seed, prompt(1, seed))
    request = pb.WatchPrefixesRequest(pool_id=POOL, since_revision=since, incarnation=incarnation)
    error = await refusal(world, request)
    assert error.field == "since_revision"
    assert "start again from a snapshot" in str(error)
    request.since_revision = await revision_of(caller) - 4
    call = world.stub.WatchPrefixes(request)
    answer = await asyncio.wait_for(call.read(), 10)
    assert len(answer.events[0].hashes) == 4 * 16, "so many are kept"
    call.cancel()


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


async def test_followers_that_are_overrun_again_and_again_end_equal(
    four_changes, start_world
) -> None:
    world = await start_world(num_device_blocks=12, num_host_blocks=6)
    callers = [await world.caller() for _ in range(2)]
    async with following(world.client) as one, following(world.client) as other:
        await churn(world, callers, random.Random(2))
        last = await revision_of(callers[0])
        await asyncio.gather(one.until(last), other.until(last))
        assert min(one.num_snapshots, other.num_snapshots) >= 2
        stored, _ = await snapshot(world.stub, POOL, "")
        assert one.held == other.held == {(each.block_hash, each.tier): each for each in stored}


async def test_a_data_plane_that_restarts_clears_the_feed(world, caller) -> None:
    await caller.admit(1, prompt(2))
    async with following(world.client) as follower:
        await follower.until(await revision_of(caller))
        assert len(follower.held) == 2
        world.shard.hang_up()
        world.callers.clear()
        world.shard = await world.register(epoch=12)
        again = await world.caller()
        await again.admit(1, prompt(1, seed=1))
        # The pool that was built anew may be at a revision that the follower has passed.
        async with asyncio.timeout(10):
            while len(follower.held) != 1:
                await asyncio.sleep(0.01)
        world.shard.hang_up()


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
        async with asyncio.timeout(10):
            while len(follower.held) != 1:
                await asyncio.sleep(0.01)
        assert follower.num_snapshots >= 2
        shard.hang_up()


async def test_what_is_not_there_cannot_be_followed(world) -> None:
    with pytest.raises(PoolNotFoundError):
        await anext(world.client.watch_prefixes("nowhere"))
