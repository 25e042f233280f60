"""One thread that runs an executor's commands, outside of the event loop: those that the event loop
submits, and those that come by sockets.
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
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from data_plane.server.fair_queue import FairQueue, Lane
from kvplane.slices import Slices, whole
from kvplane.transport.local.spin import Spin

T = TypeVar("T")

_Work = Callable[[], bool]  # runs the next slice of a command; returns whether it was the last


class WaitResult(NamedTuple):
    """The result of a wait for packets. ``busy_s``: how long the answered ones took.
    ``has_packet``: whether there is one for ``serve``.
    """

    busy_s: float
    has_packet: bool


NOTHING: Final = WaitResult(0.0, False)


class _Served(NamedTuple):
    """A socket that the thread serves. ``serve`` runs when it can be read. ``wait`` looks for
    packets until something else is ready at the epoll file that is its argument. Neither may raise.
    """

    lane: Lane
    serve: Callable[[], Slices[None]]
    wait: Callable[[int], WaitResult] | None


class WorkerThread:
    """Runs commands one after the other: those of a lane in the order in which they came, and lanes
    in the order that ``FairQueue`` gives them.
    """

    def __init__(self, begin: Callable[[], None] | None = None, *, spin_s: float = 0.0) -> None:
        """``begin`` is called first, on the thread; its exceptions are raised here. ``spin_s``: for
        how many seconds after a socket's command the thread polls for more instead of sleeping.
        """
        self.num_waiting = 0
        """Commands of ``run`` that run or wait for the thread; for the event loop."""
        self._given: deque[tuple[Lane | None, _Work]] = deque()
        self._commands: FairQueue[_Work] = FairQueue()
        self._served: dict[int, _Served] = {}
        self._queued: set[int] = set()  # sockets that have a command in the queue
        self._spin = Spin(spin_s)
        self._spin_until_s = 0.0
        self._served_last: int | None = None  # the socket
        self._ready = select.epoll()
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC)
        self._ready.register(self._doorbell, select.EPOLLIN)
        self._is_closing = False
        began: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(begin, began), name="data-plane", daemon=True
        )
        self._thread.start()
        began.result()

    async def run(self, command: Callable[[], T], lane: Lane | None = None) -> T:
        """Run ``command``, even if the caller stops waiting for it, and return or raise its result.
        Commands without a lane run before all others.
        """
        return await self.run_slices(lambda: whole(command), lane)

    async def run_slices(self, command: Callable[[], Slices[T]], lane: Lane | None) -> T:
        """Run a command as ``run`` does, but let other commands run between its slices."""
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

        self._give(lane, work)
        self.num_waiting += 1
        return await answer

    def submit(self, command: Callable[[], T], lane: Lane) -> Future[T]:
        """Run a command as ``run`` does, from any thread; returns its future result. Raises
        RuntimeError after ``close``.
        """
        answer: Future[T] = Future()

        def work() -> bool:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(command())
                except BaseException as error:
                    answer.set_exception(error)
            return True

        self._give(lane, work)
        return answer

    def post(self, command: Callable[[], None]) -> None:
        """Run ``command``, which must not raise, before the commands that wait in lanes."""

        def work() -> bool:
            command()
            return True

        self._give(None, work)

    @property
    def spin_s(self) -> float:
        """Seconds for which the thread polls for a packet before it sleeps."""
        return self._spin.spin_s

    def watch(
        self,
        fd: int,
        lane: Lane,
        serve: Callable[[], Slices[None]],
        wait: Callable[[int], WaitResult] | None = None,
    ) -> None:
        """Serve a socket: run ``serve`` whenever ``fd`` can be read. ``wait``, called afterwards,
        looks for more until something else is ready at the epoll file that is its argument. Neither
        may raise. Called on the thread.
        """
        self._served[fd] = _Served(lane, serve, wait)
        self._ready.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop serving a socket; a command that is queued still runs. Called on the thread."""
        del self._served[fd]
        self._queued.discard(fd)
        self._ready.unregister(fd)

    def close(self) -> None:
        """Accept no more commands; wait for those accepted before. Harmless when called again."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._doorbell, 1)
        self._thread.join()
        self._ready.close()
        os.close(self._doorbell)

    def _give(self, lane: Lane | None, work: _Work) -> None:
        """Queue a slice of a command. Raises RuntimeError after ``close``."""
        if self._is_closing:
            raise RuntimeError("the worker thread was closed")
        self._given.append((lane, work))
        os.eventfd_write(self._doorbell, 1)

    def _work(self, begin: Callable[[], None] | None, began: Future[None]) -> None:
        try:
            if begin is not None:
                begin()
        except BaseException as error:
            began.set_exception(error)
            return
        began.set_result(None)
        while True:
            self._collect()
            if not len(self._commands):
                if self._is_closing:
                    return
                continue
            lane, work = self._commands.take()
            begin_s = time.perf_counter()
            if not work():
                self._commands.put_back(lane, work)
            self._commands.charge(lane, time.perf_counter() - begin_s)
            del work

    def _collect(self) -> None:
        """Queue all commands that have come since. Waits for some if nothing is queued."""
        ready = self._look()
        # Nothing rings the doorbell after `close`, whose own ring may have been read before.
        if not self._others(ready) and not len(self._commands) and not self._is_closing:
            ready = self._wait()
        for fd, _ in ready:
            if fd == self._doorbell:
                os.eventfd_read(fd)
            elif fd not in self._queued:
                self._queued.add(fd)
                lane, serve, _ = self._served[fd]
                self._commands.put(lane, partial(self._serve, fd, serve()))
        while self._given:
            self._commands.put(*self._given.popleft())

    def _wait(self) -> list[tuple[int, int]]:
        """Wait, and return the files that are ready. The socket served last is polled."""
        fd = self._served_last
        while fd in self._served:
            lane, _, wait = self._served[fd]
            if wait is None:
                return self._spin.look(self._look, until_s=self._spin_until_s) or self._ready.poll()
            busy_s, has_packet = wait(self._ready.fileno())
            if busy_s:
                self._commands.charge(lane, busy_s)
            ready = [(fd, select.EPOLLIN)] if has_packet else self._look()
            if has_packet or not busy_s or self._others(ready):
                return ready or self._ready.poll()
        return self._ready.poll()

    def _others(self, ready: list[tuple[int, int]]) -> bool:
        """Whether something is ready besides the socket that was served last."""
        return any(fd != self._served_last for fd, _ in ready)

    def _look(self) -> list[tuple[int, int]]:
        return self._ready.poll(0)

    def _serve(self, fd: int, rest: Slices[None]) -> bool:
        """Run a slice of a socket's command."""
        try:
            next(rest)
            return False
        except StopIteration:
            self._queued.discard(fd)
            self._spin_until_s = time.monotonic() + self._spin.spin_s
            self._served_last = fd
            return True
