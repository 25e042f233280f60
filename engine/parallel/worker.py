"""A rank other than 0: ``python -m engine.parallel.worker``. Rank 0 starts it and sends it an
``Assignment``, pickled, on its standard input.
"""

from __future__ import annotations

import pickle
import sys

from kvplane.errors import KvplaneError
from kvplane.serving.event_loop import tune_grpc
from kvplane.serving.observability import logs


def main() -> int:
    """Run this rank until rank 0 ends; returns the exit code, 1 if that came without a stop."""
    tune_grpc()
    from .rank import follow

    logs.setup("warning", "text")
    try:
        follow(pickle.load(sys.stdin.buffer))
    except KvplaneError as error:
        print(f"engine: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
