"""A served data plane whose device fails: once, for good, or while the server stops."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from data_plane import EmbeddedDataPlane
from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backend import Kernels
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.kernels.device.cuda_streams import DeviceStreams
from kvplane import Execution, Tensor
from kvplane.errors import InternalError
from kvplane.transport.health import check
from tests.helpers.data.data_server import author_of, config_of, serving
from tests.helpers.data.kernel_faults import with_operations
from tests.helpers.data.kernel_sets import LateRuntime, late_kernels
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import set_blocks, span, tokens
from tests.helpers.planning.register_side import RegisterSide
from tests.helpers.served import Served, served

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
SERVICE = "kvplane.v1.ExecutionService"


def use(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """Servers that start from now on run on ``kernels``."""
    monkeypatch.setattr(
        "data_plane.server.server.kernels_of", lambda _device, _num_threads: kernels
    )


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> LateRuntime:
    kernels, runtime = late_kernels(CpuKernels(1), 0)
    use(monkeypatch, kernels)
    return runtime


@pytest.fixture
async def side() -> AsyncIterator[RegisterSide]:
    side = await RegisterSide().start()
    yield side
    await side.stop()


PARTS = [Tensor.from_array(tokens(3, num_heads)) for num_heads in (4, 2, 2)]


@asynccontextmanager
async def failing(folder: Path, shared_memory: bool) -> AsyncIterator[tuple[Served, Execution]]:
    """A plan of three tokens, whose first layer the device has failed to compute."""
    async with (
        served(folder) as peer,
        peer.client(shared_memory=shared_memory) as client,
        await client.open(peer.author.grant()) as execution,
    ):
        plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 3)])
        await execution.start(plan)
        with pytest.raises(InternalError, match="the device failed"):
            await execution.layer(0, *PARTS)
        yield peer, execution


async def test_an_answer_lost_on_its_way_is_an_error_in_a_stream_that_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_memory: bool
) -> None:
    num_lost = 0

    def attention(arguments: AttentionArguments) -> torch.Tensor:
        nonlocal num_lost
        output = CpuKernels(1).paged_attention(arguments)
        num_lost += 1
        # What is on no device can not be copied, as what a failed device should have computed.
        return output.to("meta") if num_lost == 1 else output

    use(monkeypatch, with_operations(CpuKernels(1), paged_attention=attention))
    async with failing(tmp_path, shared_memory) as (peer, execution):
        for layer in execution.layers:
            await execution.layer(layer, *PARTS)
        assert peer.author.read_receipt(*execution.receipts).plan_number == 1
        assert await check(peer.server.address) == "SERVING"


async def test_a_server_that_stops_waits_for_the_device(
    tmp_path: Path, runtime: LateRuntime
) -> None:
    async with serving(tmp_path) as (server, side):
        author, executor = author_of(server, side), server.executor
        executor.open(author.grant())
        executor.start(1, author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 3)]))
        runtime.early_share = 0.0
        executor.layer(1, 0, tokens(3, 4), tokens(3), tokens(3), **of_latest(executor))
        assert runtime.num_waiting == 2
    assert runtime.num_waiting == 0


async def test_a_device_that_is_lost_ends_the_server_with_an_error(
    tmp_path: Path, runtime: LateRuntime
) -> None:
    async with serving(tmp_path) as (server, _):
        assert await check(server.address) == "SERVING"
        forever = asyncio.create_task(server._until_lost())
        runtime.is_lost = True
        await asyncio.to_thread(server.executor.finish)
        with pytest.raises(InternalError, match="failed for good"):
            await asyncio.wait_for(forever, 10)
        for service in ("", SERVICE):
            assert await check(server.address, service=service) == "NOT_SERVING"


async def test_a_device_that_is_lost_while_an_answer_is_on_its_way_is_noticed(
    tmp_path: Path, runtime: LateRuntime, monkeypatch: pytest.MonkeyPatch, shared_memory: bool
) -> None:
    def attention(arguments: AttentionArguments) -> torch.Tensor:
        runtime.is_lost = True
        return arguments.query.to("meta")

    kernels, _ = late_kernels(CpuKernels(1), 0)
    kernels = with_operations(kernels, paged_attention=attention)
    kernels.streams = DeviceStreams(runtime)  # type: ignore[misc]
    use(monkeypatch, kernels)
    async with failing(tmp_path, shared_memory) as (peer, _):
        await asyncio.wait_for(peer.server.lost.wait(), 10)


async def test_an_embedded_plane_whose_device_is_lost_leaves_its_control_plane(
    tmp_path: Path, runtime: LateRuntime, side: RegisterSide
) -> None:
    plane = EmbeddedDataPlane(config_of(tmp_path, side.address))
    executor = await asyncio.to_thread(plane.start)
    runtime.is_lost = True
    await asyncio.to_thread(executor.finish)
    await asyncio.to_thread(plane._thread.join, 20)
    assert not plane._thread.is_alive()
    with socket.create_server((HOST, int(plane.address.rpartition(":")[2]))):
        pass  # the port is free again
    await asyncio.to_thread(plane.stop)


LOSES_ITS_DEVICE = """
import sys
from data_plane import __main__
from data_plane.server import server
from data_plane.kernels.backends.cpu import CpuKernels
from tests.helpers.data.kernel_sets import late_kernels

kernels, runtime = late_kernels(CpuKernels(1), 0)
server.kernels_of = lambda device, num_threads: kernels
runtime.is_lost = True
sys.exit(__main__.main())
"""


@pytest.mark.nightly  # a process; the server is told of the loss by the tests above
async def test_a_process_whose_device_is_lost_exits_with_an_error_line(
    tmp_path: Path, side: RegisterSide
) -> None:
    config = config_of(tmp_path, side.address)
    command = [sys.executable, "-c", LOSES_ITS_DEVICE, "--control-plane", side.address]
    command += ["--bind", f"{HOST}:0", "--layout", str(config.layout)]
    command += ["--num-device-blocks", "2", "--metrics-port", "-1"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=-1, stderr=-1, env=environment, cwd=ROOT
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1, err.decode()
    assert "data_plane: error: the device has failed for good" in err.decode()
