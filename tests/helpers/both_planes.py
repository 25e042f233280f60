"""Both planes in this process, a small pool on them, and made-up tensors for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from control_plane.server.server import ControlPlaneServer
from data_plane.server.server import DataPlaneServer
from kvplane import Execution, LayerGroup, Layout, Session, Tensor
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.data.data_server import config_of

StartServer = Callable[..., Awaitable[ControlPlaneServer]]
LAYOUT = Layout("m", 8, "float32", "float32", (LayerGroup("full", (0, 1, 2), 1, 8),))
POOL = "default"


class Planes:
    """Both planes; ``restart_control`` and ``restart_data`` begin another run of one of them."""

    def __init__(self, start_control: StartServer, folder: Path, **settings: Any) -> None:
        """``settings``: the control plane's."""
        self._start_control = partial(start_control, **settings)
        self._folder = folder
        self.control: ControlPlaneServer
        self.data: DataPlaneServer

    async def start(self, pool_id: str = POOL) -> None:
        self.control = await self._start_control()
        await self.start_data("127.0.0.1:0", pool_id)

    async def restart_control(self) -> None:
        await self.control.stop()
        self.control = await self._start_control(bind=self.control.address)

    async def restart_data(self) -> None:
        address = self.data.address
        await self.data.stop()
        await self.start_data(address)

    async def start_data(self, bind: str, pool_id: str = POOL) -> None:
        """Start a data plane, which is ``data`` from now on."""
        config = config_of(
            self._folder,
            self.control.address,
            LAYOUT,
            bind=bind,
            pool_id=pool_id,
            num_device_blocks=32,
            num_host_blocks=8,
        )
        self.data = await DataPlaneServer.start(config)
        await asyncio.wait_for(self.data.registered.wait(), 10)


async def run_step(session: Session, execution: Execution, *operations: pb.Operation) -> None:
    """Run a step and its plan, and submit the receipt."""
    result = (await session.step(operations)).raise_for_status()
    await execution.start(result.plan)
    for layer in [] if execution.has_run else execution.layers:
        await execution.layer(layer, *3 * [zeros(execution.num_tokens)])
    add_receipts(session, execution)


def add_receipts(session: Session, execution: Execution) -> None:
    """Add the receipts of an execution that ``DataClient.open`` made."""
    assert execution.has_run
    for receipt in execution.receipts:
        session.add_receipt(receipt)


def zeros(num_tokens: int) -> Tensor:
    """Return queries, keys or values."""
    shape = (num_tokens, 1, 8)
    return Tensor("float32", shape, bytes(Tensor.size_bytes("float32", shape)))
