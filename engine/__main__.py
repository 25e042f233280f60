"""``python -m engine generate``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from engine.config import GenerateConfig
from engine.program import run_program
from kvplane.serving.event_loop import tune_grpc
from kvplane.serving.settings import EXIT_BAD_SETTINGS, parse

_USAGE: Final = "Usage: python -m engine generate [OPTIONS]\n"


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit code."""
    tune_grpc()
    if not argv or argv[0] in ("-h", "--help"):
        return _help()
    if argv[0] != "generate":
        print(
            f"engine: error: {argv[0]!r} is not a command; the only one is generate",
            file=sys.stderr,
        )
        return EXIT_BAD_SETTINGS
    return run_program("engine", lambda: _generate(argv[1:]))


def _generate(argv: Sequence[str]) -> int:
    """Torch is imported only once the settings are known to be right."""
    config = parse(GenerateConfig, "engine generate", argv, os.environ)
    from engine.generate import run

    return run(config)


def _help() -> int:
    """Every command's help."""
    print(_USAGE)
    try:
        parse(GenerateConfig, "engine generate", ["--help"], {})
    except SystemExit as end:
        if end.code:
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
