"""How many loads of files run at one time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LoadSlots:
    """One caller's loads wait for its own first, so that others wait for at most a few of each
    caller, however many it asks for.
    """

    def __init__(self, num: int) -> None:
        self._all = asyncio.Semaphore(num)
        self._num_of_one = max(1, num - 1)
        self._own: dict[str, asyncio.Semaphore] = {}
        self._num_here: Counter[str] = Counter()

    @asynccontextmanager
    async def taken(self, caller: str) -> AsyncIterator[None]:
        """During a load of ``caller``, once it is its turn."""
        own = self._own.setdefault(caller, asyncio.Semaphore(self._num_of_one))
        self._num_here[caller] += 1
        try:
            async with own, self._all:
                yield
        finally:
            self._num_here[caller] -= 1
            if not self._num_here[caller]:
                del self._num_here[caller], self._own[caller]
