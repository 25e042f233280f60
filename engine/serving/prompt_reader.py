"""Reads prompts outside the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from queue import Empty, PriorityQueue

from kvplane.errors import PlaneUnavailableError

Read = Callable[[], Sequence[int]]


class PromptReader:
    """Reads prompts in a thread of its own, the shortest first: a tokenizer takes seconds for a
    long text, of which others wait for one at most.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._waiting: PriorityQueue[tuple[int, int, Read, Future[Sequence[int]]]] = PriorityQueue()
        self._numbers = count()

    async def read(self, read: Read, num_characters: int) -> Sequence[int]:
        """Return what ``read`` returns. Raises its error."""
        ids: Future[Sequence[int]] = Future()
        self._waiting.put((num_characters, next(self._numbers), read, ids))
        self._thread.submit(self._read_next)
        return await asyncio.wrap_future(ids)

    def close(self) -> None:
        """End the thread. Prompts that wait fail with PlaneUnavailableError."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with suppress(Empty):
            while True:
                *_, ids = self._waiting.get_nowait()
                if ids.set_running_or_notify_cancel():
                    ids.set_exception(PlaneUnavailableError("the engine is stopping"))

    def _read_next(self) -> None:
        _, _, read, ids = self._waiting.get_nowait()
        if ids.set_running_or_notify_cancel():
            try:
                ids.set_result(read())
            except BaseException as error:
                ids.set_exception(error)
