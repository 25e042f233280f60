"""The program: settings and logs, then a server that runs until it is told to stop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence

from data_plane.server.config import PROGRAM, DataPlaneConfig
from data_plane.server.server import DataPlaneServer
from kvplane import tracing
from kvplane.errors import InternalError, KvplaneError, StaleEpochError
from kvplane.serving import event_loop
from kvplane.serving.observability import logs
from kvplane.serving.settings import EXIT_BAD_SETTINGS, log_settings, parse


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run with the settings of ``argv`` and ``environ``; the exit code. Exits for bad settings."""
    config = parse(DataPlaneConfig, PROGRAM, argv, environ)
    logs.setup(config.log_level, config.log_format)
    log_settings(config, logging.getLogger(PROGRAM))
    try:
        tracing.setup("kvplane-data-plane", environ)
        event_loop.run(_serve(config))
    except (InternalError, StaleEpochError) as error:  # the device failed; the shard was taken over
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 1
    except KvplaneError as error:  # a model, layout or device that cannot be used
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return EXIT_BAD_SETTINGS
    except (OSError, RuntimeError) as error:  # an address in use, or memory that is not there
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 1
    return 0


async def _serve(config: DataPlaneConfig) -> None:
    server = await DataPlaneServer.start(config)
    await server.run_until_signal()
