"""Data planes report ahead to control planes that stand by, and a next leader asks for the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from both_planes import LAYOUT, run_step
from control_wire import PATIENCE_S, RawShard
from flaky_proxy import FlakyProxy
from registration_messages import chain, report

from control_plane.server.server import ControlPlaneServer
from data_plane.server.config import DataPlaneConfig
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, DataClient, ops
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire.error_codec import from_rpc_error

PROMPT = list(range(1, 65))  # of eight blocks
LATER = list(range(100, 117))


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def reports_to(server: ControlPlaneServer) -> list[pb.BlockReport]:
    """The parts of reports that the leader gets from now on."""
    parts: list[pb.BlockReport] = []
    original = server.core.report

    def keep(pool_id: str, index: int, epoch: int, part: pb.BlockReport) -> None:
        parts.append(part)
        original(pool_id, index, epoch, part)

    server.core.report = keep  # type: ignore[method-assign]
    return parts


def compared_by(server: ControlPlaneServer) -> list[int]:
    """Of how many ranges each comparison of a process that reports ahead asks for a report."""
    asked: list[int] = []
    original = server.core.ahead.compare

    def compare(hello: pb.Hello, part: pb.BlockDigests) -> pb.ReportRequest | None:
        request = original(hello, part)
        if request is not None:
            asked.append(sum(len(of.ranges) // 4 for of in request.ranges))
        return request

    server.core.ahead.compare = compare  # type: ignore[method-assign]
    return asked


@pytest.fixture
def election(tmp_path: Path) -> str:
    return f"file:{tmp_path}/leader"


async def two_control_planes(
    start: Any, election: str
) -> tuple[ControlPlaneServer, ControlPlaneServer]:
    """The one that leads, and one that stands by."""
    leader = await start(election=election)
    await until(lambda: leader.metrics.leads)
    return leader, await start(election=election)


@asynccontextmanager
async def data_plane(
    folder: Path, control_planes: str, **settings: Any
) -> AsyncIterator[DataPlaneServer]:
    layout = folder / "layout.json"
    layout.write_text(json.dumps(asdict(LAYOUT)))
    config = DataPlaneConfig(
        **{
            "control_plane": control_planes,
            "bind": "127.0.0.1:0",
            "layout": layout,
            "num_device_blocks": 200,
            "num_host_blocks": 70,
            "num_threads": 1,
            "metrics_port": -1,
            "grace_s": 1.0,
            "ahead_interval_s": 0.05,
            **settings,
        }
    )
    server = await DataPlaneServer.start(config)
    try:
        await asyncio.wait_for(server.registered.wait(), PATIENCE_S)
        yield server
        server.executor.check_integrity()
    finally:
        await server.stop()


async def write(address: str, data: DataPlaneServer, *prompts: list[int]) -> None:
    """Prompts, published at the data plane when this returns."""
    num_blocks = data.executor.published.num_blocks + sum(len(p) // 8 for p in prompts)
    async with ControlClient(address) as control, DataClient(data.address) as client:
        await control.wait_ready("default", PATIENCE_S)
        session = await control.open_session("default", LAYOUT)
        execution = await client.open(session.grant)
        for number, prompt in enumerate(prompts, 1):
            await run_step(session, execution, ops.admit(number, prompt))
        await session.submit_receipts()
        await session.close()
    await until(lambda: data.executor.published.num_blocks == num_blocks)


async def num_found(server: ControlPlaneServer, prompt: list[int]) -> int:
    async with ControlClient(server.address) as control:
        await control.wait_ready("default", PATIENCE_S)
        (found,) = await control.find_prefix(prompt)
        return found.num_device_tokens


def blocks_of(parts: list[pb.BlockReport]) -> int:
    return sum(len(blocks.indices) // 4 for part in parts for blocks in part.blocks)


async def test_a_next_leader_that_was_told_all_asks_for_nothing(
    start_control_plane: Any, election: str, tmp_path: Path
) -> None:
    leader, other = await two_control_planes(start_control_plane, election)
    asked = compared_by(other)
    async with data_plane(tmp_path, f"{leader.address},{other.address}") as data:
        await until(lambda: asked)
        await write(leader.address, data, PROMPT)
        parts = reports_to(other)
        await until(lambda: sum(asked) > 0)
        await until(lambda: asked[-2:] == [0, 0])
        await leader.stop()
        assert await num_found(other, PROMPT) == len(PROMPT)
        assert parts == [pb.BlockReport(last=True)]
        other.core.check_integrity()


async def test_a_control_plane_that_stops_ends_what_is_reported_ahead(
    start_control_plane: Any, connect: Any, election: str
) -> None:
    _, other = await two_control_planes(start_control_plane, election)
    shard = RawShard(connect(other), is_ahead=True)
    await shard.register()
    other._registrar.stop()
    await shard.send(heartbeat=pb.Heartbeat())
    with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
        await shard.receive()


async def test_a_next_leader_asks_for_what_it_was_not_told(
    start_control_plane: Any, election: str, tmp_path: Path
) -> None:
    """The stream to it is cut before the last blocks are written, and stays cut."""
    leader, other = await two_control_planes(start_control_plane, election)
    asked = compared_by(other)
    async with (
        data_plane(tmp_path, f"{leader.address},{other.address}", ahead_interval_s=3600.0) as data,
    ):
        await until(lambda: asked)
        assert asked == [0], "it knows that nothing was ever allocated"
        await write(leader.address, data, PROMPT, LATER)
        parts = reports_to(other)
        await leader.stop()
        assert await num_found(other, PROMPT) == len(PROMPT)
        assert await num_found(other, LATER) == 16
        assert 0 < blocks_of(parts) <= 64, "of one range of four"
        assert asked == [0]


async def test_a_stream_that_is_cut_goes_on_where_it_was(
    start_control_plane: Any, election: str, tmp_path: Path
) -> None:
    leader, other = await two_control_planes(start_control_plane, election)
    asked = compared_by(other)
    async with (
        FlakyProxy(other.address) as proxy,
        data_plane(tmp_path, f"{leader.address},{proxy.address}") as data,
    ):
        await write(leader.address, data, PROMPT)
        await until(lambda: sum(asked) > 0 and asked[-1] == 0)
        before = len(asked)
        proxy.cut()
        await until(lambda: len(asked) > before + 1)
        assert not any(asked[before:]), "it still knows what it was told"


async def test_who_leads_takes_no_reports_ahead_and_who_stands_by_no_others(
    start_control_plane: Any, connect: Any, election: str
) -> None:
    leader, other = await two_control_planes(start_control_plane, election)
    for server, is_ahead in ((leader, True), (other, False)):
        shard = RawShard(connect(server), is_ahead=is_ahead)
        await shard.send(hello=shard.hello)
        error = from_rpc_error(await shard.failure())
        assert (error.reason, "lead" in str(error)) == ("PLANE_UNAVAILABLE", True)


async def test_a_report_ahead_ends_when_the_control_plane_leads(
    start_control_plane: Any, connect: Any, election: str
) -> None:
    leader, other = await two_control_planes(start_control_plane, election)
    shard = RawShard(connect(other), is_ahead=True)
    assert (await shard.register()).compares
    await leader.stop()
    await until(lambda: other.metrics.leads)
    await shard.send(report=report({3: 4}))
    assert from_rpc_error(await shard.failure()).reason == "PLANE_UNAVAILABLE"
    assert other.core.list_pools() == []


async def test_a_report_that_was_cut_is_compared_when_its_process_comes_back(
    start_control_plane: Any, connect: Any
) -> None:
    """Without an election too; and a process with another epoch reports all."""
    server = await start_control_plane()
    stub = connect(server)
    shard = RawShard(stub)
    assert not (await shard.register()).compares
    await shard.report(report({3: 1}, *chain(range(8), [(3, 1)]), last=False))
    await until(lambda: server.core._pools["pool"].shards.reports.said_by)
    shard.hang_up()
    again = RawShard(stub)
    assert (await again.register()).compares
    await again.send(digests=pb.BlockDigests(salt=bytes(16), tier=tpb.TIER_DEVICE, last=True))
    error = from_rpc_error(await again.failure())
    assert (error.reason, error.field) == ("INVALID_REQUEST", "digests")
    third = RawShard(stub)
    assert (await third.register()).compares
    for tier, last in ((tpb.TIER_DEVICE, False), (tpb.TIER_HOST, True)):
        await third.send(
            digests=pb.BlockDigests(salt=bytes(16), tier=tier, digests=bytes(16), last=last)
        )
    asked = (await third.receive()).report_request
    assert asked.only_ranges
    assert [(of.tier, of.ranges) for of in asked.ranges] == [
        (tpb.TIER_DEVICE, bytes(4)),
        (tpb.TIER_HOST, bytes(4)),
    ]
    await third.report(report({5: 2}, *chain(range(8), [(5, 2)])))
    async with ControlClient(server.address) as control:
        await control.wait_ready("pool", PATIENCE_S)
        described = await control.describe_pool("pool")
    assert described.usage.tiers[0].num_cached_blocks == 1


async def test_digests_that_were_not_asked_for_are_refused(
    start_control_plane: Any, connect: Any
) -> None:
    shard = RawShard(connect(await start_control_plane()))
    await shard.register()
    await shard.send(digests=pb.BlockDigests(salt=bytes(16), tier=tpb.TIER_DEVICE, last=True))
    error = from_rpc_error(await shard.failure())
    assert (error.reason, error.field) == ("INVALID_REQUEST", "digests")
