"""``python -m demo``. Exit codes: 0 all is right, 1 it is not, 2 bad settings."""

from __future__ import annotations

import os
import sys

from demo.config import DemoConfig
from engine.commands.program import run_program
from kvplane.serving.settings import parse


def _run() -> int:
    """Torch is imported only once the settings are known to be right."""
    config = parse(DemoConfig, "demo", sys.argv[1:], os.environ)
    from demo.run import run

    return run(config)


if __name__ == "__main__":
    sys.exit(run_program("demo", _run))
