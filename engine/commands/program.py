"""Turns signals and errors of the engine's command-line programs into exit codes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from kvplane.errors import KvplaneError


def run_program(name: str, run: Callable[[], int]) -> int:
    """Run a program; returns its exit code. Errors of kvplane are one line on stderr, and 1."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    except KvplaneError as error:
        print(f"{name}: error: {error.reason}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Raise SystemExit on a signal, so that everything that was started is stopped."""
    sys.exit(128 + number)
