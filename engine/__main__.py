"""``python -m engine generate`` and ``python -m engine demo``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final, NoReturn

from engine.config import DemoConfig, GenerateConfig
from kvplane.errors import KvplaneError
from kvplane.serving.settings import EXIT_BAD_SETTINGS, parse

_COMMANDS: Final = ("generate", "demo")


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        return _help()
    if argv[0] not in _COMMANDS:
        commands = " or ".join(_COMMANDS)
        print(f"engine: error: {argv[0]!r} is not a command: {commands}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        return _run(argv[0], argv[1:])
    except KvplaneError as error:
        print(f"engine: error: {error.reason}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(command: str, argv: Sequence[str]) -> int:
    """Torch is imported only once the settings are known to be right."""
    if command == "demo":
        demo_config = parse(DemoConfig, "engine demo", argv, os.environ)
        from engine.demo import run as run_demo

        return run_demo(demo_config)
    config = parse(GenerateConfig, "engine generate", argv, os.environ)
    from engine.generate import run

    return run(config)


def _help() -> int:
    """Every command's help, one after the other."""
    print("Usage: python -m engine {generate|demo} [OPTIONS]\n")
    for name, config_class in (("generate", GenerateConfig), ("demo", DemoConfig)):
        try:
            parse(config_class, f"engine {name}", ["--help"], {})
        except SystemExit as end:
            if end.code:
                raise
        print()
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End by an exception, so that whatever was started is stopped."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
