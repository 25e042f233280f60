"""Both planes together: the control plane's own plans run on the data plane's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from data_server import config_of
from plan_author import LAYOUT, dense_attention, tokens

from control_plane.server.config import ControlPlaneConfig
from control_plane.server.server import ControlPlaneServer
from data_plane.server.server import DataPlaneServer
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from kvplane import ops
from kvplane.control_client import ControlClient
from kvplane.data_client import DataClient
from kvplane.errors import StaleError
from kvplane.execution import Execution
from kvplane.results import require_done
from kvplane.session import Session
from kvplane.tensor import Tensor
from kvplane.v1 import control_pb2 as pb

POOL = "pool"
CPU = torch.device("cpu")


def key_of(positions: torch.Tensor) -> torch.Tensor:
    """Keys (and values, and a quarter of the queries) are functions of the position alone."""
    return tokens(64, seed=1)[positions]


class Engine:
    """One session that runs what it is given and checks every output."""

    def __init__(self, session: Session, execution: Execution) -> None:
        self.session = session
        self.execution = execution

    async def step(self, *operations: pb.Operation, spans: list[tuple[int, int]]) -> pb.StepResult:
        """``spans``: first position and number of tokens of each span of the plan."""
        result = require_done(await self.session.step(operations))
        started = await self.execution.start(result.plan)
        assert started.num_tokens == sum(num for _, num in spans)
        if started.receipt is None:
            for layer in self.execution.layers:
                await self._layer(layer, spans)
        assert self.execution.receipt is not None
        self.session.add_receipt(self.execution.receipt)
        return result

    async def _layer(self, layer: int, spans: list[tuple[int, int]]) -> None:
        positions = [torch.arange(first, first + num) for first, num in spans]
        key = key_of(torch.cat(positions))
        query = key.repeat_interleave(2, dim=1)
        parts = (Tensor.from_proto(tensor_to_message(t)) for t in (query, key, key))
        answer = await self.execution.layer(layer, *parts)
        got = tensor_from_message(answer.to_proto(), CPU, field="output")
        begin = 0
        for (first, num), own in zip(spans, positions, strict=True):
            seen = key_of(torch.arange(first + num))
            want = dense_attention(key_of(own).repeat_interleave(2, dim=1), seen, seen)
            torch.testing.assert_close(got[begin : begin + num], want, atol=1e-5, rtol=1e-5)
            begin += num


@pytest.fixture
async def control() -> AsyncIterator[ControlPlaneServer]:
    server = await ControlPlaneServer.start(
        ControlPlaneConfig(bind="127.0.0.1:0", metrics_port=-1, grace_s=1.0)
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
    control: ControlPlaneServer, data: DataPlaneServer
) -> None:
    prompt = list(range(20))
    async with ControlClient(control.address) as client, DataClient(data.address) as remote:
        async with (
            await client.open_session(POOL, LAYOUT) as session,
            await remote.open(session.grant) as execution,
        ):
            engine = Engine(session, execution)
            await engine.step(ops.admit(1, prompt), spans=[(0, 20)])
            await engine.step(ops.append(1, [20], num_slots=1, first_position=20), spans=[(20, 1)])
            await engine.step(ops.fork(1, 2), spans=[])
            both = [ops.append(n, [21], num_slots=1, first_position=21) for n in (2, 1)]
            await engine.step(*both, spans=[(21, 1), (21, 1)])
            await engine.step(ops.swap_out([1, 2]), spans=[])
            await engine.step(ops.swap_in([1, 2]), spans=[])
            await engine.step(
                ops.append(2, [22], num_slots=1, first_position=22), ops.free([1]), spans=[(22, 1)]
            )
            hit = await engine.step(ops.admit(3, prompt), spans=[(16, 4)])
            assert hit.results[0].admit.num_cached_tokens == 16
            counters = data.executor.counters.num_transferred_blocks
            assert all(counters[direction] > 0 for direction in ("copy", "swap_out", "swap_in"))
            assert data.executor.num_published_blocks == 2
        async with asyncio.timeout(20):
            while data.executor.num_sessions:  # closing a session fences it here
                await asyncio.sleep(0.01)
        assert data.executor.num_sequences == 0


async def test_a_restarted_control_plane_finds_what_was_published(
    tmp_path: Path, control: ControlPlaneServer, data: DataPlaneServer
) -> None:
    prompt = list(range(20))
    async with ControlClient(control.address) as client, DataClient(data.address) as remote:
        session = await client.open_session(POOL, LAYOUT)
        execution = await remote.open(session.grant)
        engine = Engine(session, execution)
        await engine.step(ops.admit(1, prompt), spans=[(0, 20)])
        await engine.step(ops.append(1, [20], num_slots=1, first_position=20), spans=[(20, 1)])
        async with asyncio.timeout(20):
            while data.executor.num_published_blocks < 2:
                await asyncio.sleep(0.01)
        await control.stop()
        successor = await ControlPlaneServer.start(
            ControlPlaneConfig(bind=control.address, metrics_port=-1, grace_s=1.0)
        )
        try:
            await client.wait_ready(POOL, timeout_s=20)
            with pytest.raises(StaleError):
                await remote.read_blocks(session.grant, 1)
            session = await client.open_session(POOL, LAYOUT)
            async with await remote.open(session.grant) as execution:
                engine = Engine(session, execution)
                hit = await engine.step(ops.admit(1, prompt), spans=[(16, 4)])
                assert hit.results[0].admit.num_cached_tokens == 16
            await session.close()
        finally:
            await successor.stop()
