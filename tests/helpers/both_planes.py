"""Both planes in this process, a small pool on them, and made-up tensors for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

from control_plane.server.server import ControlPlaneServer
from data_plane.server.config import DataPlaneConfig
from data_plane.server.server import DataPlaneServer
from kvplane import LayerGroup, Layout

StartServer = Callable[..., Awaitable[ControlPlaneServer]]
LAYOUT = Layout("m", 8, "float32", "float32", (LayerGroup("full", (0, 1, 2), 1, 8),))
POOL = "default"


class Planes:
    """Both planes; ``restart_control`` and ``restart_data`` begin another run of one of them."""

    def __init__(self, start_control: StartServer, folder: Path) -> None:
        self._start_control = start_control
        self._layout_file = folder / "layout.json"
        self._layout_file.write_text(json.dumps(asdict(LAYOUT)))
        self.control: ControlPlaneServer
        self.data: DataPlaneServer

    async def start(self) -> None:
        self.control = await self._start_control()
        await self._start_data("127.0.0.1:0")

    async def restart_control(self) -> None:
        await self.control.stop()
        self.control = await self._start_control(bind=self.control.address)

    async def restart_data(self) -> None:
        address = self.data.address
        await self.data.stop()
        await self._start_data(address)

    async def _start_data(self, bind: str) -> None:
        config = DataPlaneConfig(
            control_plane=self.control.address,
            bind=bind,
            layout=self._layout_file,
            num_device_blocks=32,
            num_host_blocks=8,
            num_threads=1,
            metrics_port=-1,
            grace_s=1.0,
        )
        self.data = await DataPlaneServer.start(config)
        await asyncio.wait_for(self.data.registered.wait(), 10)
