"""``python -m data_plane``. Exit codes: 0 stopped by signal, 1 cannot serve, 2 bad settings.

1 includes a device that has failed for good, and a later process that has taken over this one's
shard: the process has to be started again.
"""

from __future__ import annotations

import os
import sys

from kvplane.cli.extras import run_or_explain
from kvplane.serving.event_loop import end_at_signals, tune_grpc


def main() -> int:
    """Run the data plane until a signal; returns the process's exit code."""
    end_at_signals()
    tune_grpc()

    def run_program() -> int:
        from data_plane.server.server import run

        return run(sys.argv[1:], os.environ)

    return run_or_explain("data_plane", "data-plane", run_program)


if __name__ == "__main__":
    sys.exit(main())
