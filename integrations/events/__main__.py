"""``python -m kvplane.integrations.events``: see ``kvplane.integrations.events.program``."""

from __future__ import annotations

import os
import sys

from kvplane.cli.extras import run_or_explain
from kvplane.serving.event_loop import end_at_signals, tune_grpc


def main() -> int:
    """Run the program; the exit code."""
    end_at_signals()
    tune_grpc()

    def run_program() -> int:
        from .program import run

        return run(sys.argv[1:], os.environ)

    return run_or_explain("events", "events", run_program)


if __name__ == "__main__":
    sys.exit(main())
