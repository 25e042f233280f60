"""Both planes as servers in this process, with made-up tensors for them."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from control_plane.config import CoreConfig
from control_plane.server.config import ControlPlaneSettings
from control_plane.server.server import ControlPlaneServer
from data_plane.server.config import DataPlaneSettings
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, Execution, LayerGroup, Layout, Session, Tensor
from kvplane.wire.v1 import session_pb2 as pb

LAYOUT = Layout("m", 8, "float32", "float32", (LayerGroup("full", (0, 1, 2), 1, 8),))
StartServer = Callable[..., Awaitable[ControlPlaneServer]]
POOL = "default"
SHARDED_LAYOUT = Layout("m", 8, "float32", "float32", (LayerGroup("full", (0, 1, 2, 3), 4, 8),))
SHARDED_POOL = "sharded"
NUM_HEADS = 8  # of queries in a pool of SHARDED_LAYOUT
PROMPT = tuple(random.Random(7).choices(range(1000), k=28))  # three blocks and a half
NUM_BLOCKS = 4
SEQUENCE = 1


def settings_of(pool_id: str, control_plane: str, layout: Path, **settings: Any) -> dict[str, Any]:
    """Return settings of a data plane on a free port. ``layout``: a file."""
    return {
        "control_plane": control_plane,
        "bind": "127.0.0.1:0",
        "pool_id": pool_id,
        "layout": layout,
        "num_device_blocks": 32,
        "num_host_blocks": 8,
        "num_threads": 1,
        "metrics_port": -1,
        "grace_s": 0.5,
        **settings,
    }


def write_layout(folder: Path, layout: Layout = LAYOUT) -> Path:
    path = folder / "layout.json"
    path.write_text(json.dumps(asdict(layout)))
    return path


def control_config(**settings: Any) -> ControlPlaneSettings:
    """Make a control plane's settings from its own and its core's."""
    names = settings.keys() & {field.name for field in fields(CoreConfig)}
    core = CoreConfig(**{name: settings.pop(name) for name in names})
    return ControlPlaneSettings(**settings, core=core)


Ranges = dict[str, int | str]
"""Settings of a data plane that say which part of its pool it holds."""


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


class Planes:
    """A control plane and the data planes of one pool, each a server in this process.

    ``async with Planes(folder) as planes``: ready when entered. ``shards``: what each data plane
    holds. ``control``: settings of the control plane.
    """

    control: ControlPlaneServer

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Ranges] = ({},),
        layout: Layout = LAYOUT,
        *,
        pool_id: str = POOL,
        **control: Any,
    ) -> None:
        self.layout = layout
        self.data_planes: dict[int, DataPlaneServer] = {}
        self._folder, self._shards, self._pool_id = folder, dict(enumerate(shards)), pool_id
        self._control_settings = control

    async def __aenter__(self) -> Planes:
        await self._start_control("127.0.0.1:0")
        for index in self._shards:
            await self.start(index)
        return self

    async def __aexit__(self, *_: object) -> None:
        for plane in self.data_planes.values():
            await plane.stop()
            plane.executor.check_integrity()
        await self.control.stop()
        self.control.core.check_integrity()

    @property
    def address(self) -> str:
        """The control plane's."""
        return self.control.address

    @property
    def data(self) -> DataPlaneServer:
        """The data plane of a pool that has one."""
        return self.data_planes[0]

    async def start(self, index: int = 0, bind: str = "127.0.0.1:0", **settings: Any) -> None:
        """Start a data plane, or a later process of one that was stopped."""
        layout = write_layout(self._folder, self.layout)
        values = {"bind": bind, "grace_s": 0.2, **self._shards.get(index, {}), **settings}
        config = DataPlaneSettings(**settings_of(self._pool_id, self.address, layout, **values))
        plane = self.data_planes[index] = await DataPlaneServer.start(config)
        with suppress(TimeoutError):  # where others of the pool are missing
            await asyncio.wait_for(plane.registered.wait(), 10)

    async def stop(self, index: int = 0) -> None:
        await self.data_planes.pop(index).stop()

    async def restart_data(self) -> None:
        """Start a later process of the data plane at the same address."""
        address = self.data.address
        await self.stop()
        await self.start(0, address)

    async def restart_control(self) -> None:
        """Start another control plane at the same address."""
        await self.control.stop()
        await self._start_control(self.address)

    async def _start_control(self, bind: str) -> None:
        defaults = {"metrics_port": -1, "grace_s": 0.2}
        config = control_config(bind=bind, **{**defaults, **self._control_settings})
        self.control = await ControlPlaneServer.start(config)


def sharded(folder: Path, shards: Sequence[Ranges], layout: Layout = SHARDED_LAYOUT) -> Planes:
    """Return planes of the pool SHARDED_POOL."""
    return Planes(folder, shards, layout, pool_id=SHARDED_POOL)


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


@asynccontextmanager
async def control_plane(**settings: Any) -> AsyncIterator[ControlPlaneServer]:
    defaults = {"bind": "127.0.0.1:0", "metrics_port": -1, "grace_s": 0.5}
    server = await ControlPlaneServer.start(control_config(**{**defaults, **settings}))
    try:
        yield server
        server.core.check_integrity()
    finally:
        await server.stop()


@asynccontextmanager
async def data_plane(**settings: Any) -> AsyncIterator[DataPlaneServer]:
    server = await DataPlaneServer.start(DataPlaneSettings(**settings))
    try:
        yield server
        server.executor.check_integrity()
    finally:
        await server.stop()


class Side:
    """A session of one pool, and what speaks to its data plane."""

    def __init__(
        self,
        control: ControlClient,
        session: Session,
        execution: Execution,
        plane: DataPlaneServer,
    ) -> None:
        self.control = control
        self.session = session
        self.execution = execution
        self.plane = plane

    async def run(self, operation: pb.Operation, positions: Sequence[int]) -> list[bytes]:
        """A step that computes the tokens at ``positions``; each layer's attention output."""
        result = await self.session.run(operation)
        await self.execution.start(result.plan)
        outputs = [await self.layer(layer, positions) for layer in self.execution.layers]
        await self.session.submit_receipts()
        return outputs

    async def layer(self, layer: int, positions: Sequence[int]) -> bytes:
        tensor = made_up(layer, positions)
        return bytes((await self.execution.layer(layer, tensor, tensor, tensor)).data)

    async def num_cached(self) -> int:
        """Tokens of the prompt that a session would find."""
        (found,) = await self.control.find_prefix(PROMPT, pool_ids=[self.session.pool_id])
        return found.num_cached_tokens


def made_up(layer: int, positions: Sequence[int]) -> Tensor:
    """Numbers [num_tokens, 1, 8] that depend on the layer and the position."""
    numbers = [
        random.Random(1000 * position + layer).uniform(-1, 1) + i / 8
        for position in positions
        for i in range(8)
    ]
    return Tensor("float32", (len(positions), 1, 8), struct.pack(f"<{len(numbers)}f", *numbers))


@asynccontextmanager
async def side(control: ControlClient, plane: DataPlaneServer, pool_id: str) -> AsyncIterator[Side]:
    await control.wait_ready(pool_id, timeout_s=60)
    session = await control.open_session(pool_id, LAYOUT)
    async with session, session.open_execution() as execution:
        yield Side(control, session, execution, plane)
