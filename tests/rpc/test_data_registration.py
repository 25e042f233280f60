"""A data plane registers, reports, does as it is told, and comes back after every break."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from data_plane import EmbeddedDataPlane
from data_plane.execution.executor import Executor
from data_plane.server.server import DataPlaneServer, build_executor
from kvplane.clients.data_client import DataClient
from kvplane.errors import PoolNotReadyError, SessionExpiredError
from kvplane.release import release
from kvplane.transport.health import check
from kvplane.wire import signing
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION, OLDEST_PAYLOAD_VERSION
from tests.helpers.data.data_server import author_of, config_of, serving
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import (
    DEVICE,
    blocks_of,
    int32,
    int64,
    publications,
    set_blocks,
    span,
    tokens,
)
from tests.helpers.planning.register_side import RegisterSide

SERVICE = "kvplane.v1.ExecutionService"


async def test_hello_says_who_and_what_registers(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, side):
        hello = side.hellos[0]
        assert hello.epoch == server.executor.epoch
        assert hello.layout.fingerprint == server.executor.layout.fingerprint
        assert (hello.num_device_blocks, hello.num_host_blocks) == (8, 4)
        assert hello.address == server.address
        assert (hello.incarnation, hello.key_id) == (0, b"")
        assert (hello.shard.num_shards, hello.shard.num_layers) == (1, 2)
        assert hello.version == release()
        assert hello.oldest_payload_version == OLDEST_PAYLOAD_VERSION
        assert hello.newest_payload_version == NEWEST_PAYLOAD_VERSION
        for _ in range(3):  # at the interval that was asked for
            await asyncio.wait_for(side.heartbeats.get(), 10)


async def test_a_control_plane_that_chooses_an_unknown_payload_version_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    side = RegisterSide()
    side.payload_version = 9
    await side.start()
    server = await DataPlaneServer.start(config_of(tmp_path, side.address))
    try:
        await side.until(lambda: len(side.hellos) == 2)
        assert side.num_reports == 0
        assert await check(server.address) == "NOT_SERVING"
        told = registrations_ended(caplog)[0]
        assert "reason=PROTOCOL_MISMATCH" in told
        assert "the control plane 'test' chose payload version 9" in told
        assert f"this data plane {release()!r}" in told
        side.payload_version = NEWEST_PAYLOAD_VERSION  # it was updated
        await side.until(server.registered.is_set)
    finally:
        await server.stop()
        await side.stop()


async def test_health_is_not_serving_until_registered(tmp_path: Path) -> None:
    side = RegisterSide()
    await side.start()
    port = side.port
    await side.stop()
    server = await DataPlaneServer.start(config_of(tmp_path, f"127.0.0.1:{port}"))
    try:
        assert await check(server.address) == "NOT_SERVING"
        late = await RegisterSide().start(port)
        await asyncio.wait_for(server.registered.wait(), 20)
        assert await check(server.address) == "SERVING"
        assert await check(server.address, service=SERVICE) == "SERVING"
        await late.stop()
    finally:
        await server.stop()


async def test_a_resolver_that_is_away_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = await RegisterSide().start()
    server = await DataPlaneServer.start(config_of(tmp_path, f"{side.address},{side.address}"))
    try:
        await side.until(server.registered.is_set)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(10))
        await side.stop()
        begin_s = time.monotonic()
        for _ in range(20):
            assert await check(server.address) == "SERVING"
            await asyncio.sleep(0.05)
        assert time.monotonic() - begin_s < 5
        again = await RegisterSide().start(side.port)
        await again.until(lambda: again.hellos)
        await again.stop()
    finally:
        await server.stop()


async def test_a_broken_stream_is_resumed_and_sessions_live_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, side):
        author = author_of(server, side)
        server.executor.open(author.grant())
        plan = author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 2)])
        server.executor.start(1, plan)
        side.break_streams()
        await side.until(lambda: len(side.hellos) == 2)
        await side.until(side.accepted.is_set)
        assert side.hellos[1].incarnation == side.incarnation
        assert side.hellos[1].key_id == signing.key_id(side.key)
        assert side.num_reports == 1, "a resumed data plane does not report again"
        server.executor.layer(1, 0, None, tokens(2), tokens(2), **of_latest(server.executor))


async def test_a_new_control_plane_learns_blocks_and_old_sessions_end(tmp_path: Path) -> None:
    """But nothing of a block that was withdrawn."""
    async with serving(tmp_path) as (server, side):
        author = author_of(server, side)
        server.executor.open(author.grant(7))
        server.executor.start(7, author.plan(1, 7, changes=[set_blocks(1, [(0, 5), (1, 1)])]))
        side.say(publish=rpb.PublishBlocks(publications=publications((0, 5))))
        side.say(publish=rpb.PublishBlocks(publications=publications((1, 1))))
        await side.until(lambda: server.executor.blocks.num_published == 2)
        withdrawn = {"indices": int32(1), "generations": int64(1)}
        side.say(withdraw=rpb.WithdrawBlocks(**withdrawn))
        await side.until(lambda: server.executor.blocks.num_published == 1)
        await side.stop()
        successor = await RegisterSide(incarnation=2).start(side.port)
        try:
            await successor.until(successor.accepted.is_set)
            assert reported(successor) == [(0, 5), (1, 1)]
            told = [p for part in successor.reports for p in part.publications]
            assert told == [publications((0, 5))]
            assert server.executor.incarnation == 2
            with pytest.raises(SessionExpiredError):
                server.executor.receipt(7)
        finally:
            await successor.stop()


def reported(side: RegisterSide) -> list[tuple[int, int]]:
    """(index, generation) of each block of the device tier."""
    parts = [blocks for part in side.reports for blocks in part.blocks]
    return [block for part in parts if part.tier == DEVICE for block in blocks_of(part)]


async def test_blocks_are_reported_again_when_the_control_plane_asks(tmp_path: Path) -> None:
    """On the same stream and under the same key, as when another shard has restarted."""
    async with serving(tmp_path) as (server, side):
        author = author_of(server, side)
        server.executor.open(author.grant(1))
        server.executor.start(1, author.plan(1, changes=[set_blocks(1, [(2, 4)])]))
        side.reports.clear()
        side.say(fence=rpb.Fence(session=author.session(1), ordinal=1))
        side.say(report_request=rpb.ReportRequest())
        await side.until(lambda: side.num_reports == 2)
        assert side.fences_done.get_nowait() == author.session(1)
        assert reported(side) == [(2, 4)]
        side.say(publish=rpb.PublishBlocks(publications=publications((2, 4))))
        await side.until(lambda: server.executor.blocks.num_published == 1)
        assert len(side.hellos) == 1, "the stream goes on"
        assert server.executor.open(author.grant(2)) == 2, "the key stays"


async def test_a_report_that_nobody_sent_is_not_accepted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_server, side):
        side.say(report_accepted=rpb.ReportAccepted())
        await side.until(lambda: len(side.hellos) == 2)


async def test_a_control_plane_of_a_lower_incarnation_gets_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, side):
        await side.stop()
        second = await RegisterSide(incarnation=2).start(side.port)
        await second.until(second.accepted.is_set)
        await second.stop()
        older = await RegisterSide(incarnation=1).start(side.port)
        await older.until(lambda: bool(older.hellos))
        await asyncio.sleep(0.1)
        await older.stop()
        assert not older.reports
        assert server.executor.incarnation == 2


async def test_a_fence_ends_the_session_before_it_is_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, side):
        author = author_of(server, side)
        server.executor.open(author.grant(3))
        side.say(fence=rpb.Fence(session=author.session(3), ordinal=3))
        assert await asyncio.wait_for(side.fences_done.get(), 10) == author.session(3)
        with pytest.raises(SessionExpiredError):
            server.executor.open(author.grant(3))


async def test_a_malformed_publication_does_not_end_the_data_plane(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, side):
        side.say(publish=rpb.PublishBlocks(publications=publications((99, 1))))
        await side.until(lambda: len(side.hellos) == 2)
        await side.until(side.accepted.is_set)
        async with DataClient(server.address) as client:
            assert (await client.get_server_info()).shard.epoch == server.executor.epoch


async def test_an_embedded_data_plane_registers_and_serves_from_a_thread(tmp_path: Path) -> None:
    side = await RegisterSide().start()
    plane = EmbeddedDataPlane(config_of(tmp_path, side.address))
    executor = await asyncio.to_thread(plane.start)
    try:
        assert side.hellos[0].epoch == executor.epoch
        async with DataClient(plane.address) as client:
            assert (await client.get_server_info()).shard.epoch == executor.epoch
    finally:
        await asyncio.to_thread(plane.stop)
        await side.stop()
    assert "data-plane-loop" not in {thread.name for thread in threading.enumerate()}


async def test_no_thread_of_a_data_plane_has_torchs_helpers_from_making_the_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_in: list[threading.Thread] = []

    def make(*arguments: Any) -> Executor:
        made_in.append(threading.current_thread())
        return build_executor(*arguments)

    monkeypatch.setattr("data_plane.server.server.build_executor", make)
    async with serving(tmp_path):
        assert len(made_in) == 1
        assert not made_in[0].is_alive()


async def test_an_embedded_data_plane_with_no_control_plane_says_so(tmp_path: Path) -> None:
    plane = EmbeddedDataPlane(config_of(tmp_path, "127.0.0.1:1"))
    with pytest.raises(PoolNotReadyError):
        await asyncio.to_thread(plane.start, 0.3)


async def test_an_address_that_does_not_serve_the_control_plane_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as that of another data plane, or of any other gRPC server."""
    other = grpc.aio.server()
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    (tmp_path / "other").mkdir()
    async with serving(tmp_path / "other", pool_id="other") as (data, _):
        for address in (data.address, f"127.0.0.1:{port}"):
            caplog.clear()
            server = await DataPlaneServer.start(config_of(tmp_path, address))
            try:
                async with asyncio.timeout(20):
                    while len(told := registrations_ended(caplog)) < 3:
                        await asyncio.sleep(0.01)
            finally:
                await server.stop()
            assert all(f" control_plane={address} " in line for line in told)
            assert any(
                "the control plane is not served there: is --control-plane right?" in line
                for line in told
            )
            assert not any("Internal error from Core" in line for line in told)
    await other.stop(None)


def registrations_ended(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if line.startswith("registration ended reason=")]
