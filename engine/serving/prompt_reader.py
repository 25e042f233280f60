"""Reads prompts outside the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from queue import PriorityQueue
from threading import Thread

Read = Callable[[], Sequence[int]]


class PromptReader:
    """Reads prompts in its own thread, the shortest first: a long text takes seconds to tokenize,
    and others wait for at most one such text.
    """

    def __init__(self) -> None:
        self._waiting: PriorityQueue[tuple[int, int, Read, Future[Sequence[int]]]] = PriorityQueue()
        self._numbers = count()
        Thread(target=self._run, name="tokenizer", daemon=True).start()

    async def read(self, read: Read, num_characters: int) -> Sequence[int]:
        """Return what ``read`` returns. Raises its error."""
        ids: Future[Sequence[int]] = Future()
        self._waiting.put((num_characters, next(self._numbers), read, ids))
        return await asyncio.wrap_future(ids)

    def _run(self) -> None:
        while True:
            _, _, read, ids = self._waiting.get()
            if ids.set_running_or_notify_cancel():
                try:
                    ids.set_result(read())
                except BaseException as error:
                    ids.set_exception(error)
