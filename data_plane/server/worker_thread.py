"""One thread that runs an executor's commands in order, outside of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class WorkerThread:
    """Runs commands one after the other, in the order of the calls to ``run``."""

    def __init__(self, begin: Callable[[], None] | None = None) -> None:
        """``begin`` is called first, on the thread."""
        self.num_waiting = 0
        """Commands that run or wait for the thread; for the event loop."""
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="data-plane", initializer=begin
        )

    async def run(self, command: Callable[[], T]) -> T:
        """What ``command`` returns or raises. It runs even if the caller stops waiting for it."""
        self.num_waiting += 1
        running = asyncio.get_running_loop().run_in_executor(self._thread, command)
        running.add_done_callback(self._ended)
        return await running

    def _ended(self, _: object) -> None:
        self.num_waiting -= 1

    def close(self) -> None:
        """Wait for the commands that were given to ``run``, and accept no more."""
        self._thread.shutdown()
