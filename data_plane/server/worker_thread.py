"""One thread that runs an executor's commands, outside of the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from data_plane.pieces import Pieces, whole
from data_plane.server.fair_queue import FairQueue, Lane

T = TypeVar("T")


class WorkerThread:
    """Runs commands one after the other: those of a lane in the order of the calls to ``run``, and
    lanes in the order that ``FairQueue`` gives them.
    """

    def __init__(self, begin: Callable[[], None] | None = None) -> None:
        """``begin`` is called first, on the thread."""
        self.num_waiting = 0
        """Commands that run or wait for the thread; for the event loop."""
        self._commands: FairQueue[Callable[[], bool]] = FairQueue()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._work, args=(begin,), name="data-plane", daemon=True
        )
        self._thread.start()

    async def run(self, command: Callable[[], T], lane: Lane | None = None) -> T:
        """What ``command`` returns or raises. It runs even if the caller stops waiting for it.
        Commands of no lane run before all others.
        """
        return await self.run_pieces(lambda: whole(command), lane)

    async def run_pieces(self, command: Callable[[], Pieces[T]], lane: Lane | None) -> T:
        """As ``run``; other commands run between the pieces."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            self.num_waiting -= 1
            if answer.cancelled():
                return
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        rest = command()

        def work() -> bool:
            """Run the next piece. Returns whether it was the last."""
            result, error = None, None
            try:
                next(rest)
                return False
            except StopIteration as end:
                result = end.value
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(settle, result, error)
            return True

        with self._changed:
            if self._is_closing:
                raise RuntimeError("the worker thread was closed")
            self._commands.put(lane, work)
            self._changed.notify()
        self.num_waiting += 1
        return await answer

    def close(self) -> None:
        """Wait for the commands that were given to ``run``, and accept no more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self, begin: Callable[[], None] | None) -> None:
        if begin is not None:
            begin()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._commands) or self._is_closing)
                if not len(self._commands):
                    return
                lane, command = self._commands.take()
            begin_s = time.perf_counter()
            has_ended = command()
            with self._changed:
                if not has_ended:
                    self._commands.put_back(lane, command)
                self._commands.charge(lane, time.perf_counter() - begin_s)
            del command
