"""``python -m engine``: see ``engine.commands.main``."""

from __future__ import annotations

import sys

from kvplane.cli.extras import run_or_explain
from kvplane.serving.event_loop import end_at_signals, tune_grpc


def main() -> int:
    """Run the engine's command line; returns its exit code."""
    end_at_signals(is_command=True)
    tune_grpc()

    def run() -> int:
        from .commands.main import main

        return main(sys.argv[1:])

    return run_or_explain("engine", "engine", run)


if __name__ == "__main__":
    sys.exit(main())
