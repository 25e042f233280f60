"""The event loop of the planes' programs, and the gRPC that runs on it (docs/adr/steps.md)."""

from __future__ import annotations

import os
import signal
from collections.abc import Coroutine
from typing import Any


def tune_grpc() -> None:
    """Make gRPC wake half as many threads for a message, unless the user chose its experiments.

    Call it before gRPC is imported, which reads the variable; so this module imports no gRPC.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


def end_at_signals(*, is_command: bool = False) -> None:
    """Make SIGTERM and SIGINT end the process until the program handles them: a server with exit
    code 0, a command with 128 and the signal's number, because it has not done what it was asked.

    Without a handler, a container's first process would ignore SIGTERM; an exception that a handler
    raises could be swallowed by an import.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: os._exit(128 + got if is_command else 0))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as ``asyncio.run`` does, on uvloop, which costs less for each call."""
    import uvloop  # here, so that a program can say that it is not installed

    uvloop.run(main)
