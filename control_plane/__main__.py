"""``python -m control_plane``. Exit codes: 0 stopped by signal, 1 cannot serve, 2 bad settings."""

from __future__ import annotations

import sys

from kvplane.cli.extras import run_server


def main() -> int:
    """Run the control plane until a signal; returns the process's exit code."""
    return run_server("control_plane", "control-plane", "control_plane.server.server")


if __name__ == "__main__":
    sys.exit(main())
