"""Waits for what happens in another task, thread or process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvplane.errors import KvplaneError


async def until(holds: Callable[[], object], patience_s: float = 30.0) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    async with asyncio.timeout(patience_s):
        while not holds():
            await asyncio.sleep(0.01)


def wait_until(
    holds: Callable[[], object], patience_s: float = 60.0, why: Callable[[], object] = str
) -> None:
    """Wait in this thread until a condition holds; a plane that is not there yet is no error.
    ``why`` describes what is the matter once the patience is over.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            if holds():
                return
        except KvplaneError:
            pass
        assert time.monotonic() < deadline_s, f"not in {patience_s:.0f} s: {why()}"
        time.sleep(0.02)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process; at the end it goes on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        # It runs on for a moment after the call.
        wait_until(lambda: "\nState:\tT" in Path(f"/proc/{pid}/status").read_text())
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
