"""One thread that runs an executor's commands in order, outside of the event loop: those that the
event loop gives it, and those that come by local sockets.

In each round it runs what the event loop has given it, and one command of each socket that has one.
So nobody who sends much keeps others waiting for more than that.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from kvplane.transport.local.spin import Spin

T = TypeVar("T")


class WorkerThread:
    """Runs commands one after the other, in the order of the calls to ``run``."""

    def __init__(self, begin: Callable[[], None] | None = None, *, spin_s: float = 0.0) -> None:
        """``begin`` is called first, on the thread. ``spin_s``: how long after a command of a
        socket the thread looks for more instead of sleeping, since waking up takes long.
        """
        self.num_waiting = 0
        """Commands of ``run`` that run or wait for the thread; for the event loop."""
        self._spin = Spin(spin_s)
        self._spin_until_s = 0.0
        self._commands: deque[Callable[[], None]] = deque()
        self._serve: dict[int, Callable[[], None]] = {}
        self._ready = select.epoll()
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC)
        self._ready.register(self._doorbell, select.EPOLLIN)
        self._is_closing = self._is_stopped = False
        began: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(begin, began), name="data-plane", daemon=True
        )
        self._thread.start()
        began.result()

    async def run(self, command: Callable[[], T]) -> T:
        """What ``command`` returns or raises. It runs even if the caller stops waiting for it."""
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

        def work() -> None:
            result, error = None, None
            try:
                result = command()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(settle, result, error)

        self.post(work)
        self.num_waiting += 1
        return await answer

    def post(self, command: Callable[[], None]) -> None:
        """Have ``command``, which must not raise, run too. Raises RuntimeError after ``close``."""
        if self._is_closing:
            raise RuntimeError("the worker thread was closed")
        self._commands.append(command)
        os.eventfd_write(self._doorbell, 1)

    def watch(self, fd: int, serve: Callable[[], None]) -> None:
        """On the thread: call ``serve``, which must not raise, whenever ``fd`` can be read."""
        self._serve[fd] = serve
        self._ready.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """On the thread: the opposite of ``watch``."""
        del self._serve[fd]
        self._ready.unregister(fd)

    def close(self) -> None:
        """Wait for the commands that were given to ``run``, and accept no more. Harmless when
        called again.
        """
        if self._is_closing:
            return
        self.post(self._stop)
        self._is_closing = True
        self._thread.join()
        self._ready.close()
        os.close(self._doorbell)

    def _stop(self) -> None:
        self._is_stopped = True

    def _work(self, begin: Callable[[], None] | None, began: Future[None]) -> None:
        try:
            if begin is not None:
                begin()
        except BaseException as error:
            began.set_exception(error)
            return
        began.set_result(None)
        while not self._is_stopped:
            for fd, _ in self._poll():
                if fd == self._doorbell:
                    os.eventfd_read(fd)
                    for _ in range(len(self._commands)):
                        self._commands.popleft()()
                elif fd in self._serve:  # unless what ran before it has ended it
                    self._serve[fd]()
                    self._spin_until_s = time.monotonic() + self._spin.spin_s

    def _poll(self) -> list[tuple[int, int]]:
        """What can be read, once something can."""
        ready = self._spin.look(self._look, until_s=self._spin_until_s)
        return ready or self._ready.poll()

    def _look(self) -> list[tuple[int, int]]:
        return self._ready.poll(0)
