"""Planes in this process, and a session that has computed a prompt there."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from control_plane.config import CoreConfig
from control_plane.server.config import ControlPlaneSettings
from control_plane.server.server import ControlPlaneServer
from data_plane.server.config import DataPlaneSettings
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, Execution, LayerGroup, Layout, Session, Tensor
from kvplane.wire.v1 import session_pb2

LAYOUT = Layout("m", 8, "float32", "float32", (LayerGroup("full", (0, 1, 2), 1, 8),))
PROMPT = tuple(random.Random(7).choices(range(1000), k=28))  # three blocks and a half
NUM_BLOCKS = 4
SEQUENCE = 1


def settings_of(pool_id: str, control_plane: str, layout: Path, **settings: Any) -> dict[str, Any]:
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

    async def run(self, operation: session_pb2.Operation, positions: Sequence[int]) -> list[bytes]:
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
    session = await control.open_session(pool_id, plane.executor.layout)
    async with session, session.open_execution() as execution:
        yield Side(control, session, execution, plane)
