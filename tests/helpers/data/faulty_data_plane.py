"""A data plane with a planted fault: python -m tests.helpers.data.faulty_data_plane FAULT ..."""

from __future__ import annotations

import asyncio
import os
import sys

from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.server.config import PROGRAM, DataPlaneSettings
from data_plane.server.server import DataPlaneServer
from kvplane.serving.settings import parse
from tests.helpers.data.kernel_faults import with_fault


async def serve(fault: str, arguments: list[str]) -> None:
    config = parse(DataPlaneSettings, PROGRAM, [*arguments, "--device", "cpu"], os.environ)
    kernels = with_fault(CpuKernels(config.num_threads), fault)
    server = await DataPlaneServer.start(config, kernels)
    await server.run_until_signal()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2:]))
