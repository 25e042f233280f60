"""Alerts fire under their faults and clear after them, on a live stack; a minute is a second. The
expression of each alert is tested in ``tests/unit/test_prometheus_rules.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from kvplane import ControlClient
from kvplane.session import Session
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import execution_pb2_grpc
from kvplane.wire.v1.types_pb2 import SignedPayload
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
    of_control = ["--lease-s", "2"]
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


@pytest.mark.nightly  # waits for Prometheus; rules are tested on push
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
