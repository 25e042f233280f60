"""``python -m data_plane``. Exit codes: 0 stopped by signal, 1 cannot serve, 2 bad settings.

1 includes a device that has failed for good, and a later process that has taken over this one's
shard: the process has to be started again.
"""

from __future__ import annotations

import sys

from kvplane.cli.extras import run_server


def main() -> int:
    """Run the data plane until a signal; returns the process's exit code."""
    return run_server("data_plane", "data-plane", "data_plane.server.server")


if __name__ == "__main__":
    sys.exit(main())
