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


def end_at_signals() -> None:
    """Make SIGTERM and SIGINT end the process with exit code 0 until the server handles them.
    Without a handler, a container's first process would ignore SIGTERM; an exception that a handler
    raises could be swallowed by an import.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as ``asyncio.run`` does, on uvloop, which costs less for each call."""
    import uvloop  # here, so that a program can say that it is not installed

    uvloop.run(main)
