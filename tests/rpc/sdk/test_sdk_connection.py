"""A client's connection: leases are renewed, and waits for an absent plane have an end."""

from __future__ import annotations

import asyncio
import socket

import grpc.aio
import pytest

from kvplane import ControlClient
from kvplane.errors import DeadlineExceededError, PlaneUnavailableError
from kvplane.wire.v1 import session_pb2_grpc
from tests.helpers.sdk_peers import LAYOUT, SESSION, ScriptedControlPlane, serving


async def test_a_lease_is_renewed_three_times_in_its_life() -> None:
    plane = ScriptedControlPlane(time_to_live_s=0.3)
    async with serving(plane) as address, ControlClient(address) as client:
        session = await client.open_session("p", LAYOUT)
        await asyncio.sleep(0.75)
        assert 3 <= len(plane.renewals) <= 7
        assert all(renewed == session.ref for renewed in plane.renewals)
        await session.close()
        seen = len(plane.renewals)
        await asyncio.sleep(0.3)
        assert len(plane.renewals) == seen


async def test_a_plane_that_accepts_and_says_nothing_is_late_not_for_ever() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        async with ControlClient(f"127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.3) as client:
            with pytest.raises((DeadlineExceededError, PlaneUnavailableError)):
                await client.get_server_info()


async def test_a_call_reaches_a_plane_that_comes_up_late() -> None:
    server = grpc.aio.server()
    session_pb2_grpc.add_SessionServiceServicer_to_server(ScriptedControlPlane(), server)
    port = server.add_insecure_port("127.0.0.1:0")  # bound, but not served yet
    async with ControlClient(f"127.0.0.1:{port}") as client:
        opening = asyncio.ensure_future(client.open_session("p", LAYOUT))
        await asyncio.sleep(0.2)
        await server.start()
        session = await opening
        assert session.ref == SESSION
        await session.close()
    await server.stop(0)
