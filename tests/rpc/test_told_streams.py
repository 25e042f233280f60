"""One session steps among many: only those who have something to be told are written to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from control_plane.server import registration_server, service
from control_plane.watching import Watcher
from kvplane import Session, ops
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.planning.control_wire import PATIENCE_S, RawShard
from tests.helpers.planning.operations_world import World, prompt

StartWorld = Callable[..., Awaitable[World]]

NUM_POOLS = 12
NUM_STEPS = 5


class Told:
    """What the control plane has sent or asked about without a request, by pool or session."""

    def __init__(self, patch: pytest.MonkeyPatch, world: World) -> None:
        self.asked_for = Counter[str]()  # data planes' messages
        self.sent = Counter[str]()
        self.followed = Counter[str]()
        self.num_notices = 0
        core = world.server.core
        take_outgoing, take = core.take_outgoing, Watcher.take
        send, push = registration_server.Registrar._send, service._StepStream.push

        def counted_outgoing(pool_id: str, shard_index: int) -> Any:
            self.asked_for[pool_id] += 1
            return take_outgoing(pool_id, shard_index)

        def counted_send(registrar: Any, stream: Any, messages: Any) -> None:
            self.sent[stream.key[0]] += len(messages)
            send(registrar, stream, messages)

        def counted_take(follower: Watcher) -> Any:
            self.followed[follower.pool.id] += 1
            return take(follower)

        async def counted_push(stream: Any, news: pb.StreamStepsResponse) -> None:
            self.num_notices += 1
            await push(stream, news)

        patch.setattr(core, "take_outgoing", counted_outgoing)
        patch.setattr(registration_server.Registrar, "_send", counted_send)
        patch.setattr(Watcher, "take", counted_take)
        patch.setattr(service._StepStream, "push", counted_push)


@pytest.fixture
async def world(start_world: StartWorld) -> World:
    return await start_world()


@pytest.fixture
async def pools(world: World) -> AsyncIterator[dict[str, tuple[RawShard, Session, Any]]]:
    """A data plane, a session with a stream, and a follower of each of many pools."""
    found: dict[str, tuple[RawShard, Session, Any]] = {}
    for i in range(NUM_POOLS):
        pool_id = f"pool-{i}"
        shard = await world.register(pool_id=pool_id)
        session = await world.client.open_session(pool_id, world.layout)
        await session.step([ops.free([])])
        call = world.stub.WatchPrefixes(ppb.WatchPrefixesRequest(pool_id=pool_id))
        while not (await asyncio.wait_for(call.read(), PATIENCE_S)).revision:
            pass
        found[pool_id] = (shard, session, call)
    yield found
    for shard, _, call in found.values():
        call.cancel()
        shard.hang_up()


async def test_a_step_writes_to_its_own_pools_streams_alone(
    world, pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch, world)
    shard, session, call = pools["pool-3"]
    for number in range(1, NUM_STEPS + 1):
        world.server.core.tick()  # looks at every pool
        result = await session.step([ops.admit(number, prompt(2, seed=number))])
        session.add_receipt(shard.receipt(result.plan))
        await session.submit_receipts()
        await shard.published(2)
        events = (await asyncio.wait_for(call.read(), PATIENCE_S)).events
        assert len(events[0].hashes) == 2 * 16
    assert set(told.sent) == set(told.asked_for) == set(told.followed) == {"pool-3"}
    assert told.sent["pool-3"] == NUM_STEPS
    assert told.num_notices == 0


async def test_only_the_session_that_has_news_is_written_to(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among many of one pool."""
    callers = [await world.caller() for _ in range(NUM_POOLS)]
    for caller in callers:
        await caller.step()
    holder, waiting = callers[0], callers[7]
    await holder.admit(1, prompt(12))
    await waiting.step(ops.admit(1, prompt(6, seed=1), wait=True))
    told = Told(monkeypatch, world)
    await holder.do(ops.free([1]))
    assert await waiting.session.wait_for_news(PATIENCE_S)
    for caller in callers:
        if caller is not waiting:
            assert not (await caller.step()).news.granted
    assert told.num_notices == 1
    assert [grant.sequence_id for grant in (await waiting.step()).news.granted] == [1]
