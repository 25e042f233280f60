"""The program: settings and logs, then a server that runs until it is told to stop."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Mapping, Sequence

from control_plane.server.config import PROGRAM, ControlPlaneConfig
from control_plane.server.server import ControlPlaneServer
from kvplane import tracing
from kvplane.errors import InvalidRequestError, PlaneUnavailableError
from kvplane.serving import event_loop
from kvplane.serving.observability import logs
from kvplane.serving.settings import EXIT_BAD_SETTINGS, log_settings, parse


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run with the settings of ``argv`` and ``environ``; the exit code. Exits for bad settings."""
    config = parse(ControlPlaneConfig, PROGRAM, argv, environ)
    logs.setup(config.log_level, config.log_format)
    log_settings(config, logging.getLogger(PROGRAM))
    try:
        tracing.setup("kvplane-control-plane", environ)
        event_loop.run(_serve(config))
    except InvalidRequestError as error:  # an election or traces that cannot be had here
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return EXIT_BAD_SETTINGS
    except (OSError, PlaneUnavailableError) as error:
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
