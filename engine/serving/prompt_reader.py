"""Reads prompts outside the engine's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from queue import PriorityQueue
from threading import Thread
from typing import Final

Read = Callable[[], Sequence[int]]


CHARACTERS_PER_S: Final = 250_000
"""Roughly what a tokenizer reads; it decides who may overtake, and nothing else."""


class PromptReader:
    """Reads prompts in its own thread, in the order in which they would be ready if each were read
    by itself. A short text overtakes a long one that came before it, unless the long one came so
    early that it could be ready by now. So neither waits for ever.
    """

    def __init__(self) -> None:
        waiting: PriorityQueue[tuple[float, int, Read, Future[Sequence[int]]]] = PriorityQueue()
        self._waiting = waiting
        self._numbers = count()
        Thread(target=self._run, name="tokenizer", daemon=True).start()

    async def read(self, read: Read, num_characters: int) -> Sequence[int]:
        """Return what ``read`` returns. Raises its error."""
        ids: Future[Sequence[int]] = Future()
        ready_s = time.monotonic() + num_characters / CHARACTERS_PER_S
        self._waiting.put((ready_s, next(self._numbers), read, ids))
        return await asyncio.wrap_future(ids)

    def _run(self) -> None:
        while True:
            _, _, read, ids = self._waiting.get()
            if ids.set_running_or_notify_cancel():
                try:
                    ids.set_result(read())
                except BaseException as error:
                    ids.set_exception(error)
