"""The event loop of the planes' programs, and the gRPC that runs on it (docs/adr/steps.md)."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any


def tune_grpc() -> None:
    """Make gRPC wake half as many threads for a message, unless the user chose its experiments.

    Call it before gRPC is imported, which reads the variable; so this module imports no gRPC.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as ``asyncio.run`` does, on uvloop, which costs less for each call."""
    import uvloop  # here, so that a program can say that it is not installed

    uvloop.run(main)
