"""A pool of several data planes on loopback, each a server of its own in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from control_plane.server.server import ControlPlaneServer
from data_plane.server.server import DataPlaneServer
from kvplane import LayerGroup, Layout
from tests.helpers.data.data_server import config_of
from tests.helpers.planes_in_process import control_config

POOL = "sharded"
LAYOUT = Layout("m", 8, "float32", "float32", (LayerGroup("full", (0, 1, 2, 3), 4, 8),))
NUM_HEADS = 8

Ranges = dict[str, int | str]
"""Settings of one data plane that set its part of the pool."""


def by_heads(num_shards: int) -> list[Ranges]:
    """Return shards that divide the KV heads evenly."""
    return [{"num_shards": num_shards, "shard_index": i} for i in range(num_shards)]


BY_LAYERS: list[Ranges] = [
    {"num_shards": 2, "shard_index": 0, "layers": "0:1"},
    {"num_shards": 2, "shard_index": 1, "layers": "1:"},
]
BY_BOTH: list[Ranges] = [
    {
        "num_shards": 4,
        "shard_index": 2 * stage + half,
        "layers": f"{2 * stage}:2",
        "kv_heads": f"{2 * half}:2",
    }
    for stage in (0, 1)
    for half in (0, 1)
]


class ShardedPool:
    """``async with ShardedPool(folder, by_heads(2)) as pool``: ready when entered."""

    def __init__(
        self, folder: Path, shards: Sequence[Ranges], layout: Layout = LAYOUT, **control: Any
    ) -> None:
        self.layout = layout
        self._folder = folder
        self._shards = shards
        self._control_settings = control
        self.control: ControlPlaneServer
        self.planes: dict[int, DataPlaneServer] = {}

    async def __aenter__(self) -> ShardedPool:
        await self._start_control("127.0.0.1:0")
        for index in range(len(self._shards)):
            await self.start(index)
        return self

    async def __aexit__(self, *_: object) -> None:
        for plane in self.planes.values():
            await plane.stop()
        await self.control.stop()

    @property
    def address(self) -> str:
        return self.control.address

    async def start(self, index: int, bind: str = "127.0.0.1:0", **settings: Any) -> None:
        """Start a shard, or a later process of one that was stopped."""
        defaults = {"num_device_blocks": 32, "num_host_blocks": 8}
        config = config_of(
            self._folder,
            self.control.address,
            self.layout,
            bind=bind,
            pool_id=POOL,
            grace_s=0.2,
            **{**defaults, **self._shards[index], **settings},
        )
        plane = self.planes[index] = await DataPlaneServer.start(config)
        with suppress(TimeoutError):
            await asyncio.wait_for(plane.registered.wait(), 10)

    async def stop(self, index: int) -> None:
        await self.planes.pop(index).stop()

    async def restart_control(self) -> None:
        """Start another control plane at the same address."""
        address = self.control.address
        await self.control.stop()
        await self._start_control(address)

    async def _start_control(self, bind: str) -> None:
        config = control_config(bind=bind, metrics_port=-1, grace_s=0.2, **self._control_settings)
        self.control = await ControlPlaneServer.start(config)
