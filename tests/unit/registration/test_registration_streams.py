"""Registration streams that overlap: of one that was superseded nothing counts any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from control_plane.pools.publications import root_of
from control_plane.server.registration_server import Registrar
from kvplane.errors import CancelledError, InvalidRequestError, QuotaExceededError
from kvplane.serving.callers.access import everything
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.registration_messages import LAYOUT, hello, report


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
def core() -> ControlPlane:
    return ControlPlane(incarnation=7, config=CoreConfig(), clock=lambda: 0.0)


@pytest.fixture
def registrar(core: ControlPlane) -> Registrar:
    return Registrar(core, heartbeat_s=5.0)


async def joined(registrar: Registrar) -> tuple[Stream, bytes]:
    """A stream of a whole pool that has reported, and the pool's key."""
    stream = Stream(registrar)
    stream.say(hello=hello())
    welcome = (await stream.hear()).welcome
    stream.say(report=report())
    assert (await stream.hear()).HasField("report_accepted")
    return stream, welcome.key


async def test_a_delayed_message_of_a_superseded_stream_changes_nothing(
    core: ControlPlane, registrar: Registrar
) -> None:
    old, key = await joined(registrar)
    session = core.open_session(
        pb.OpenSessionRequest(pool_id="pool", layout=tpb.Layout(fingerprint=LAYOUT.fingerprint)),
        "default",
    ).session
    core.close_session(session, "default")
    registrar.flush()
    assert (await old.hear()).fence.session == session
    new = Stream(registrar)
    new.say(hello=hello(incarnation=7, key_id=signing.key_id(key)))
    assert (await new.hear()).welcome.resumed

    old.say(fence_done=rpb.FenceDone(session=session))
    old.say(report=report({0: 99}))
    for _ in range(5):  # let the old stream's reader take what it was said
        await asyncio.sleep(0)
    assert core._pools["pool"].shards.is_fencing
    with pytest.raises(CancelledError):
        await old.hear()
    assert (await new.hear()).fence.session == session
    new.say(fence_done=rpb.FenceDone(session=session))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not core._pools["pool"].shards.is_fencing
    assert core.get_pool("pool").ready
    await new.answers.aclose()
    assert not core.get_pool("pool").ready


async def test_the_end_of_a_superseded_stream_does_not_disconnect_the_new_one(
    core: ControlPlane, registrar: Registrar
) -> None:
    old, key = await joined(registrar)
    new = Stream(registrar)
    new.say(hello=hello(incarnation=7, key_id=signing.key_id(key)))
    await new.hear()
    with pytest.raises(CancelledError):
        await old.hear()
    assert core.get_pool("pool").ready
    await new.answers.aclose()


async def test_what_a_stream_may_not_say_ends_it(core: ControlPlane, registrar: Registrar) -> None:
    stream, _ = await joined(registrar)
    stream.say(report=report())
    with pytest.raises(InvalidRequestError) as refusal:
        await stream.hear()
    assert refusal.value.field == "report"
    assert not core.get_pool("pool").ready


async def test_publications_of_steps_that_follow_each_other_go_together(
    core: ControlPlane, registrar: Registrar
) -> None:
    stream, _ = await joined(registrar)
    pool = core._pools["pool"]
    handle = pool.native.open_session(
        root_of(LAYOUT.fingerprint, "default", ""), pool.owner("default")
    )
    for number in range(1, 4):
        tokens = columns.pack(INT32, [number] * LAYOUT.block_size_tokens)
        pool.native.begin(handle, number)
        pool.native.admit(handle, number, tokens, b"", -1, 0, False, 0)
        pool.native.finish(handle, b"")
        pool.native.receipted(handle, number)
        core._touch(pool)
        registrar.flush()
    publications = (await stream.hear()).publish.publications
    assert len(columns.read(INT32, publications.indices, "indices")) == 3
    assert not core.has_announcements()


async def test_a_data_plane_that_does_not_read_is_cut_and_hears_what_it_missed(
    core: ControlPlane,
) -> None:
    registrar = Registrar(core, heartbeat_s=5.0, max_waiting_messages=3)
    slow, key = await joined(registrar)
    opening = pb.OpenSessionRequest(
        pool_id="pool", layout=tpb.Layout(fingerprint=LAYOUT.fingerprint)
    )
    opened = [core.open_session(opening, "default").session for _ in range(6)]
    for session in opened[:4]:
        core.close_session(session, "default")
        registrar.flush()
    assert core.get_pool("pool").ready, "the first one, and three more, may wait"
    core.close_session(opened[4], "default")
    registrar.flush()
    assert not core.get_pool("pool").ready, "it counts as gone at once"
    with pytest.raises(QuotaExceededError):
        await slow.hear()
    again = Stream(registrar)
    again.say(hello=hello(incarnation=7, key_id=signing.key_id(key)))
    assert (await again.hear()).welcome.resumed
    core.close_session(opened[5], "default")
    registrar.flush()
    fenced = [(await again.hear()).fence.session.session_id for _ in range(6)]
    assert fenced == [session.session_id for session in opened]
    assert core.get_pool("pool").ready
    await again.answers.aclose()


async def test_a_stream_that_waits_for_its_peer_for_ever_is_ended(
    core: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generator hangs in the middle of sending a message."""
    monkeypatch.setattr("control_plane.server.registration_server._CUT_AFTER_S", 0.02)
    registrar = Registrar(core, heartbeat_s=5.0)

    async def serve() -> None:
        stream = Stream(registrar)
        stream.say(hello=hello())
        async for _ in stream.answers:
            await asyncio.sleep(60)  # the peer's window is full

    carrying = asyncio.create_task(serve())
    async with asyncio.timeout(5):
        while not core.pool_ids():
            await asyncio.sleep(0.01)
        registrar.stop()
        with pytest.raises(asyncio.CancelledError):
            await carrying
