"""Both planes together: the control plane's own plans run on the data plane's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.server.config import ControlPlaneSettings
from control_plane.server.server import ControlPlaneServer
from data_plane.server.server import DataPlaneServer
from kvplane import ops
from kvplane.clients.control_client import ControlClient
from tests.helpers.checked_engine import Engine
from tests.helpers.data.data_server import config_of
from tests.helpers.data.plan_author import LAYOUT
from tests.helpers.data.unary_client import UnaryClient

POOL = "pool"


@pytest.fixture
async def control() -> AsyncIterator[ControlPlaneServer]:
    server = await ControlPlaneServer.start(
        ControlPlaneSettings(bind="127.0.0.1:0", metrics_port=-1, grace_s=1.0)
    )
    yield server
    await server.stop()


@pytest.fixture
async def data(tmp_path: Path, control: ControlPlaneServer) -> AsyncIterator[DataPlaneServer]:
    server = await DataPlaneServer.start(config_of(tmp_path, control.address))
    async with asyncio.timeout(20):
        await server.registered.wait()
    yield server
    await server.stop()
    server.executor.check_integrity()


async def test_a_sequence_lives_its_whole_life(
    control: ControlPlaneServer, data: DataPlaneServer, shared_memory: bool
) -> None:
    prompt, begins = list(range(20)), shared_memory
    async with (
        ControlClient(control.address) as client,
        UnaryClient(data.address, shared_memory=shared_memory) as remote,
    ):
        async with (
            await client.open_session(POOL, LAYOUT) as session,
            await remote.open(session.grant) as execution,
        ):
            engine = Engine(session, execution, begins=begins)
            await engine.step(ops.admit(1, prompt), spans=[(0, 20)])
            await engine.step(ops.append(1, [20], num_slots=1, first_positions=20), spans=[(20, 1)])
            await engine.step(ops.fork(1, 2), spans=[])
            both = [ops.append(n, [21], num_slots=1, first_positions=21) for n in (2, 1)]
            await engine.step(*both, spans=[(21, 1), (21, 1)])
            await engine.step(ops.swap([1, 2], "host"), spans=[])
            await engine.step(ops.swap([1, 2], "device"), spans=[])
            await engine.step(
                ops.append(2, [22], num_slots=1, first_positions=22), ops.free([1]), spans=[(22, 1)]
            )
            hit = await engine.step(ops.admit(3, prompt), spans=[(16, 4)])
            assert hit.results[0].admit.num_cached_tokens == 16
            counters = data.executor.counters.num_transferred_blocks
            assert all(counters[direction] > 0 for direction in ("copy", "swap_out", "swap_in"))
            assert data.executor.published.num_blocks == 2
        async with asyncio.timeout(20):
            while data.executor.num_sessions or data.executor.num_sequences:  # until it is fenced
                await asyncio.sleep(0.01)
