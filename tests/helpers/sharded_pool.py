"""A pool of several data planes on loopback, each a server of its own in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

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
    """``async with ShardedPool(folder, by_heads(2)) as pool``: ready when entered, and its
    integrity is checked at the end. ``data``: settings of all data planes; ``control``: of the
    control plane.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Ranges],
        layout: Layout = LAYOUT,
        pool_id: str = POOL,
        *,
        data: dict[str, Any] | None = None,
        **control: Any,
    ) -> None:
        self.layout = layout
        self.pool_id = pool_id
        self._folder = folder
        self._shards = shards
        self._data_settings = {"num_device_blocks": 32, "num_host_blocks": 8, **(data or {})}
        self._control_settings = control
        self.control: ControlPlaneServer
        self.planes: dict[int, DataPlaneServer] = {}

    async def __aenter__(self) -> Self:
        await self.start_control()
        for index in range(len(self._shards)):
            await self.start(index)
        return self

    async def __aexit__(self, *_: object) -> None:
        for plane in self.planes.values():
            await plane.stop()
            plane.executor.check_integrity()
        await self.control.stop()
        self.control.core.check_integrity()

    @property
    def address(self) -> str:
        return self.control.address

    async def start_control(self, bind: str = "127.0.0.1:0") -> None:
        defaults = {"bind": bind, "metrics_port": -1, "grace_s": 0.2}
        config = control_config(**{**defaults, **self._control_settings})
        self.control = await ControlPlaneServer.start(config)

    async def start(self, index: int = 0, bind: str = "127.0.0.1:0", **settings: Any) -> None:
        """Start a shard, or a later process of one that was stopped."""
        config = config_of(
            self._folder,
            self.control.address,
            self.layout,
            bind=bind,
            pool_id=self.pool_id,
            grace_s=0.2,
            **{**self._data_settings, **self._shards[index], **settings},
        )
        plane = self.planes[index] = await DataPlaneServer.start(config)
        with suppress(TimeoutError):
            await asyncio.wait_for(plane.registered.wait(), 10)

    async def stop(self, index: int = 0) -> None:
        await self.planes.pop(index).stop()

    async def restart(self, index: int = 0) -> None:
        """Start another process of a shard at the same address."""
        address = self.planes[index].address
        await self.stop(index)
        await self.start(index, address)

    async def restart_control(self) -> None:
        """Start another control plane at the same address."""
        await self.control.stop()
        await self.start_control(self.address)
