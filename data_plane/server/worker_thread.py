"""One thread that runs an executor's commands in order, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """Commands run one after the other, in the order in which they were given."""

    def __init__(self, begin: Callable[[], None] | None = None) -> None:
        """``begin`` is called first, on the lane's thread."""
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="data-plane", initializer=begin
        )

    async def run(self, command: Callable[[], T]) -> T:
        """What ``command`` returns or raises. A command that was given runs, also when the caller
        no longer waits for it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, command)

    def close(self) -> None:
        """Wait for the commands given, and take no more."""
        self._thread.shutdown()
