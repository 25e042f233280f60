"""``python -m kvplane.integrations.router``: see ``kvplane.integrations.router.program``."""

from __future__ import annotations

import sys

from kvplane.cli.extras import run_server


def main() -> int:
    """Run the router until a signal; returns the process's exit code."""
    return run_server("router", "router", "kvplane.integrations.router.program")


if __name__ == "__main__":
    sys.exit(main())
