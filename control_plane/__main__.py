"""``python -m control_plane``. Exit codes: 0 stopped by signal, 1 cannot serve, 2 bad settings."""

from __future__ import annotations

import os
import sys

from kvplane.cli.extras import run_or_explain
from kvplane.serving.event_loop import end_at_signals, tune_grpc


def main() -> int:
    """Run the control plane until a signal; returns the process's exit code."""
    end_at_signals()
    tune_grpc()

    def run_program() -> int:
        from control_plane.server.server import run

        return run(sys.argv[1:], os.environ)

    return run_or_explain("control_plane", "control-plane", run_program)


if __name__ == "__main__":
    sys.exit(main())
