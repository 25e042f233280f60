"""``python -m engine generate`` and ``python -m engine serve``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from engine.config import GenerateConfig
from engine.program import run_program
from engine.serving.config import ServeConfig
from kvplane.serving.event_loop import tune_grpc
from kvplane.serving.settings import EXIT_BAD_SETTINGS, parse

_USAGE: Final = "Usage: python -m engine generate|serve [OPTIONS]\n"


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit code."""
    tune_grpc()
    if not argv or argv[0] in ("-h", "--help"):
        return _help()
    if argv[0] not in _COMMANDS:
        print(
            f"engine: error: {argv[0]!r} is not a command; there are {' and '.join(_COMMANDS)}",
            file=sys.stderr,
        )
        return EXIT_BAD_SETTINGS
    return run_program("engine", lambda: _COMMANDS[argv[0]](argv[1:]))


# Torch is imported only once the settings are known to be right.


def _generate(argv: Sequence[str]) -> int:
    config = parse(GenerateConfig, "engine generate", argv, os.environ)
    from engine.generate import run

    return run(config)


def _serve(argv: Sequence[str]) -> int:
    config = parse(ServeConfig, "engine serve", argv, os.environ)
    from engine.serving.server import run

    return run(config)


_COMMANDS: Final = {"generate": _generate, "serve": _serve}


def _help() -> int:
    """Every command's help."""
    print(_USAGE)
    for command, config_class in (("generate", GenerateConfig), ("serve", ServeConfig)):
        try:
            parse(config_class, f"engine {command}", ["--help"], {})
        except SystemExit as end:
            if end.code:
                raise
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
