"""``python -m kvplane.integrations.events``: see ``kvplane.integrations.events.program``."""

from __future__ import annotations

import sys

from kvplane.cli.extras import run_server


def main() -> int:
    """Publish events until a signal; returns the process's exit code."""
    return run_server("events", "events", "kvplane.integrations.events.program")


if __name__ == "__main__":
    sys.exit(main())
