"""A data plane with its gRPC server, registered with a control plane that the test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from data_plane.kernels.backend import Kernels
from data_plane.server.config import DataPlaneSettings
from data_plane.server.server import DataPlaneServer
from kvplane.layout import Layout
from tests.helpers.data.plan_author import LAYOUT, POOL_ID, PlanAuthor
from tests.helpers.planes_in_process import settings_of, write_layout
from tests.helpers.planning.register_side import RegisterSide


def config_of(
    folder: Path, control_plane: str, layout: Layout = LAYOUT, **settings: Any
) -> DataPlaneSettings:
    """Make the settings of a data plane on a free port, and write its layout into the folder."""
    small = {"num_device_blocks": 8, "num_host_blocks": 4, "grace_s": 1.0}
    values = settings_of(POOL_ID, control_plane, write_layout(folder, layout), **small)
    return DataPlaneSettings(**{**values, **settings})


@asynccontextmanager
async def serving(
    folder: Path, kernels: Kernels | None = None, **settings: Any
) -> AsyncIterator[tuple[DataPlaneServer, Any]]:
    """Run a data plane; yield it and the side of the control plane that it is registered with."""
    side = await RegisterSide().start()
    server = await DataPlaneServer.start(config_of(folder, side.address, **settings), kernels)
    try:
        await side.until(server.registered.is_set)
        server.executor.pools.device_tier.zero_()
        server.executor.pools.host_tier.zero_()
        yield server, side
        server.executor.check_integrity()
    finally:
        await server.stop()
        await side.stop()


def author_of(server: DataPlaneServer, side: RegisterSide) -> PlanAuthor:
    return PlanAuthor(server.executor.epoch, side.incarnation, side.key)
