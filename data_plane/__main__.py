"""``python -m data_plane``. Exit codes: 0 stopped by a signal, 1 cannot serve, 2 bad settings.

1 includes a device that has failed for good: the process has to be started again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from data_plane.server.config import PROGRAM, DataPlaneConfig
from data_plane.server.server import DataPlaneServer
from kvplane.errors import InternalError, KvplaneError
from kvplane.serving import logs
from kvplane.serving.settings import EXIT_BAD_SETTINGS, log_settings, parse


def main() -> int:
    """Run the program. Returns the exit code."""
    config = parse(DataPlaneConfig, PROGRAM, sys.argv[1:], os.environ)
    logs.setup(config.log_level)
    log_settings(config, logging.getLogger(PROGRAM))
    try:
        asyncio.run(_serve(config))
    except InternalError as error:  # a device that failed
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


if __name__ == "__main__":
    sys.exit(main())
