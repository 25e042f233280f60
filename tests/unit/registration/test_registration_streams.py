"""Registration streams that overlap: of one that was superseded nothing counts any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from control_plane.server.registration_server import Registrar
from kvplane.errors import CancelledError, InvalidRequestError, QuotaExceededError
from kvplane.serving.callers.access import everything
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_model import World
from tests.helpers.planning.registration_messages import LAYOUT, hello, report
from tests.helpers.refusals import refused


class Stream:
    """One stream: what the data plane's end says, and what it hears."""

    def __init__(self, registrar: Registrar) -> None:
        self.said: asyncio.Queue[rpb.RegisterRequest] = asyncio.Queue()
        self.answers = registrar.serve(self._requests(), everything("default"))

    async def _requests(self) -> AsyncIterator[rpb.RegisterRequest]:
        while True:
            yield await self.said.get()

    def say(self, **message: Any) -> None:
        self.said.put_nowait(rpb.RegisterRequest(**message))

    async def hear(self) -> rpb.RegisterResponse:
        async with asyncio.timeout(5):
            return await anext(self.answers)


@pytest.fixture
def world() -> World:
    return World(0)


@pytest.fixture
def registrar(world: World) -> Registrar:
    return Registrar(world.core, heartbeat_s=5.0)


async def joined(registrar: Registrar) -> Stream:
    """Return a stream of a whole pool that has reported."""
    stream = Stream(registrar)
    stream.say(hello=hello())
    await stream.hear()
    stream.say(report=report())
    assert (await stream.hear()).HasField("report_accepted")
    return stream


async def resumed(registrar: Registrar, world: World) -> Stream:
    """Return a new stream of the same process."""
    stream, key_id = Stream(registrar), signing.key_id(world.pool.key)
    stream.say(hello=hello(incarnation=world.incarnation, key_id=key_id))
    assert (await stream.hear()).welcome.resumed
    return stream


async def read_said() -> None:
    """Let the streams' readers take what they were said."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_delayed_message_of_a_superseded_stream_changes_nothing(
    world: World, registrar: Registrar
) -> None:
    old = await joined(registrar)
    engine = world.engine()
    engine.close()
    registrar.flush()
    assert (await old.hear()).fence.session == engine.ref
    new = await resumed(registrar, world)

    old.say(fence_done=rpb.FenceDone(session=engine.ref))
    old.say(report=report({0: 99}))
    await read_said()
    assert world.pool.shards.is_fencing
    with pytest.raises(CancelledError):
        await old.hear()
    assert (await new.hear()).fence.session == engine.ref
    new.say(fence_done=rpb.FenceDone(session=engine.ref))
    await read_said()
    assert not world.pool.shards.is_fencing
    assert world.pool.ready, "the end of the old stream has not disconnected the new one"
    await new.answers.aclose()
    assert not world.pool.ready


async def test_what_a_stream_may_not_say_ends_it(world: World, registrar: Registrar) -> None:
    stream = await joined(registrar)
    stream.say(report=report())
    with refused(InvalidRequestError, "report"):
        await stream.hear()
    assert not world.pool.ready


async def test_publications_of_steps_that_follow_each_other_go_together(
    world: World, registrar: Registrar
) -> None:
    stream = await joined(registrar)
    world.shards.append(plane := Plane(world))
    plane.pool_key = world.pool.key
    engine = world.engine()
    for number in range(3):
        engine.write([number] * LAYOUT.block_size_tokens)
        registrar.flush()
    publications = (await stream.hear()).publish.publications
    assert len(columns.read(INT32, publications.indices, "indices")) == 3
    assert not world.core.has_announcements()


async def test_a_data_plane_that_does_not_read_is_cut_and_hears_what_it_missed(
    world: World,
) -> None:
    registrar = Registrar(world.core, heartbeat_s=5.0, max_waiting_messages=3)
    slow = await joined(registrar)
    engines = [world.engine() for _ in range(6)]
    for engine in engines[:4]:
        engine.close()
        registrar.flush()
    assert world.pool.ready, "the first one, and three more, may wait"
    engines[4].close()
    registrar.flush()
    assert not world.pool.ready, "it counts as gone at once"
    with pytest.raises(QuotaExceededError):
        await slow.hear()
    again = await resumed(registrar, world)
    engines[5].close()
    registrar.flush()
    fenced = [(await again.hear()).fence.session for _ in range(6)]
    assert fenced == [engine.ref for engine in engines]
    assert world.pool.ready
    await again.answers.aclose()


async def test_a_stream_that_waits_for_its_peer_for_ever_is_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generator hangs in the middle of sending a message."""
    monkeypatch.setattr("control_plane.server.registration_server._CUT_AFTER_S", 0.02)
    registrar = Registrar(world.core, heartbeat_s=5.0)

    async def serve() -> None:
        stream = Stream(registrar)
        stream.say(hello=hello())
        async for _ in stream.answers:
            await asyncio.sleep(60)  # the peer's window is full

    carrying = asyncio.create_task(serve())
    async with asyncio.timeout(5):
        while not world.core.pool_ids():
            await asyncio.sleep(0.01)
        registrar.stop()
        with pytest.raises(asyncio.CancelledError):
            await carrying
