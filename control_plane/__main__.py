"""``python -m control_plane``. Exit codes: 0 told to stop, 1 cannot serve, 2 bad settings."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys

from control_plane.server.config import PROGRAM, ControlPlaneConfig
from control_plane.server.server import ControlPlaneServer
from kvplane.serving import logs
from kvplane.serving.settings import log_settings, parse


def main() -> int:
    """Run the program; the exit code."""
    config = parse(ControlPlaneConfig, PROGRAM, sys.argv[1:], os.environ)
    logs.setup(config.log_level)
    log_settings(config, logging.getLogger(PROGRAM))
    try:
        asyncio.run(_serve(config))
    except OSError as error:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 1
    return 0


async def _serve(config: ControlPlaneConfig) -> None:
    server = await ControlPlaneServer.start(config)
    _reduce_garbage_collection()
    await server.run_until_signal()


def _reduce_garbage_collection() -> None:
    """Collect garbage cycles rarely: a full collection visits every entry of every index, and a
    step waits for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 1_000)


if __name__ == "__main__":
    sys.exit(main())
