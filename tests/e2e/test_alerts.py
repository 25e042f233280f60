"""Each alert fires under its fault and clears after it, on a live stack; a minute is a second."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from kvplane import ControlClient, ops
from kvplane.session import Session
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import execution_pb2_grpc
from kvplane.wire.v1.types_pb2 import SignedPayload
from tests.helpers.load import Load
from tests.helpers.monitored_stack import ROOT, RULES, MonitoredStack
from tests.helpers.tools import needs

POOL = "default"
NAMES = [
    rule["alert"]
    for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[MonitoredStack]:
    arguments = ["--model", str(ROOT / "models" / "recall")]
    arguments += ["--num-device-blocks", "256", "--num-host-blocks", "32"]
    of_control = ["--lease-s", "2", "--max-operations", "60000"]
    needs("prometheus", "alertmanager")
    with MonitoredStack(tmp_path, of_control, arguments) as stack:
        yield stack


async def session_of(control: ControlClient) -> Session:
    layout = (await control.wait_ready(POOL)).layout
    return await control.open_session(POOL, layout, "fault")


async def forge(address: str) -> None:
    """Present a plan that nobody signed."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: execution_pb2_grpc.ExecutionServiceStub = execution_pb2_grpc.ExecutionServiceStub(
            channel
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.CopyBlocks(pb.StartPlanRequest(plan=SignedPayload(payload=b"x")))


async def test_a_lost_plane_an_expired_lease_and_a_forged_plan_raise_alarms_that_end(
    stack: MonitoredStack,
) -> None:
    async with ControlClient(stack.control) as control:
        await (await session_of(control)).detach()
        await forge(stack.data)
        await stack.until_firing("KvplaneLeasesExpiring", "KvplaneStaleReferences")
        stack.planes["data_plane"].kill()
        await stack.until_firing("KvplanePlaneDown", "KvplaneShardLost")
        stack.start_plane("data_plane")
        await control.wait_ready(POOL, timeout_s=20)
        await stack.until_firing("KvplaneEpochChanged")
    await stack.until_cleared(*NAMES)


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_every_other_alert_fires_under_its_fault_and_clears_after(
    stack: MonitoredStack,
) -> None:
    async with ControlClient(stack.control) as control:
        await too_many_sequences(stack, control)
        await no_receipts(stack, control)
        await slow_steps(stack, control)
        await stopped_processes(stack)
        await unlike_prompts(stack, control)
    await stack.until_cleared(*NAMES)


async def too_many_sequences(stack: MonitoredStack, control: ControlClient) -> None:
    session = await session_of(control)
    size = session.layout.block_size_tokens
    prompts = [[*range(1000 * i, 1000 * i + 16 * size)] for i in range(15)]  # 240 of 256 blocks
    await session.step([ops.admit(i, prompt) for i, prompt in enumerate(prompts, 1)])

    async def ask() -> None:
        while True:
            await session.step([ops.admit(99, range(32 * size))])
            await asyncio.sleep(0.05)

    load = asyncio.create_task(ask())
    await stack.until_firing("KvplanePoolNearFull", "KvplaneItemsRefusedLater")
    await end(load)
    await session.close()
    await stack.until_cleared("KvplanePoolNearFull", "KvplaneItemsRefusedLater")


async def end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def no_receipts(stack: MonitoredStack, control: ControlClient) -> None:
    session = await session_of(control)
    await session.step([ops.admit(1, range(100))])
    await session.step([ops.free([1])])
    await stack.until_firing("KvplanePlanUnreceipted", "KvplaneRetiredBlocksOld")
    await session.close()
    await stack.until_cleared("KvplanePlanUnreceipted", "KvplaneRetiredBlocksOld")


async def slow_steps(stack: MonitoredStack, control: ControlClient) -> None:
    session = await session_of(control)

    async def overload() -> None:
        while True:
            await session.step([ops.free(range(1, 20_000))])

    load = asyncio.create_task(overload())
    await stack.until_firing("KvplaneStepsSlow")
    await end(load)
    await session.close()
    await stack.until_cleared("KvplaneStepsSlow")


async def stopped_processes(stack: MonitoredStack) -> None:
    pid = stack.planes["control_plane"].pid

    async def stutter() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.4)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.6)

    fault = asyncio.create_task(stutter())
    await stack.until_firing("KvplaneLoopLag")
    await end(fault)
    os.kill(pid, signal.SIGCONT)
    await stack.until_cleared("KvplaneLoopLag")


async def unlike_prompts(stack: MonitoredStack, control: ControlClient) -> None:
    sizes = {"prefix_tokens": 160, "own_tokens": 10}
    await Load(duration_s=25, num_prefixes=1, **sizes).run(control, POOL)
    unlike = Load(duration_s=60, num_prefixes=4096, seed=2, **sizes)
    load = asyncio.create_task(unlike.run(control, POOL))
    await stack.until_firing("KvplaneHitRatioCollapsed")
    await end(load)
    await Load(duration_s=25, num_prefixes=1, **sizes).run(control, POOL)
    await stack.until_cleared("KvplaneHitRatioCollapsed")
