"""A data plane whose kernels have a planted fault: python -m faulty_data_plane FAULT [FLAG ...]"""

from __future__ import annotations

import asyncio
import os
import sys

from kernel_faults import with_fault

from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.server.config import PROGRAM, DataPlaneConfig
from data_plane.server.server import DataPlaneServer
from kvplane.serving.settings import parse


async def serve(fault: str, arguments: list[str]) -> None:
    config = parse(DataPlaneConfig, PROGRAM, [*arguments, "--device", "cpu"], os.environ)
    kernels = with_fault(CpuKernels(config.num_threads), fault)
    server = await DataPlaneServer.start(config, kernels)
    await server.run_until_signal()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2:]))
