"""``python -m kvplane``: the ``kvplane`` command."""

from __future__ import annotations

import signal
import sys

from kvplane.cli.extras import run_or_explain
from kvplane.serving.event_loop import end_at_signals, tune_grpc


def main() -> int:
    """Run the ``kvplane`` command. Returns its exit code."""
    end_at_signals(is_command=True)
    tune_grpc()

    def run() -> int:
        from kvplane.cli.program import run

        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(sys.argv[1:])

    return run_or_explain("kvplane", "", run)


if __name__ == "__main__":
    sys.exit(main())
