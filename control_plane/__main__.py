"""``python -m control_plane``. Exit codes: 0 told to stop, 1 cannot serve, 2 bad settings."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the program; the exit code."""
    # Without its EventEngine gRPC wakes half as many threads for a message: ADR 0013. It reads this
    # when it is imported.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
    from control_plane.server.program import run

    return run(sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
