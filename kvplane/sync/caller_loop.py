"""An asyncio loop that runs in the thread that waits for it.

    caller:  send ── compute ── result ── send ── ...        nothing for 0.3 s
    loop:    runs               runs      runs               runs in a thread of its own

A step's answer then costs no switch between threads, and while the caller computes no other thread
takes Python's lock from it. While the caller computes for long or waits for nothing, the loop runs
in a thread of its own, where it renews leases and reads messages.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

from .loop_thread import LoopThread, Pending, checked

Result = TypeVar("Result")

_IDLE_S: Final = 0.3  # without a caller, before the loop's own thread runs it; longer than a plan
_ASK_AGAIN_S: Final = 0.01


class CallerLoop(LoopThread):
    """A loop that runs in the thread of the caller that waits. It serves one caller at a time:
    another one waits until the first has its result.

    If the caller's thread runs a loop of its own, as a notebook's does, this one stays in its own
    thread.
    """

    def __init__(self, name: str) -> None:
        self._turn = threading.Lock()  # held by the thread that runs the loop
        self._used_s = time.monotonic()  # by a caller
        # Not uvloop: in the main thread it makes a pair of sockets each time it runs.
        super().__init__(name, asyncio.new_event_loop())

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result. An interrupt while waiting cancels it."""
        if _has_a_loop():
            return super().run(coroutine)
        coroutine = checked(coroutine)
        with self._borrowed():
            return self._finish(self._loop.create_task(coroutine))

    def send(self, coroutine: Coroutine[Any, Any, Result]) -> Pending[Result]:
        """Start a coroutine and run the loop until its request is sent."""
        if _has_a_loop():
            return self.begin(coroutine)
        coroutine = checked(coroutine)
        with self._borrowed():
            task = self._loop.create_task(coroutine)
            try:
                self._loop.run_until_complete(_two_turns())
            except BaseException:
                task.cancel()
                raise
        return _Sent(self, task)

    def finish(self, task: asyncio.Task[Result]) -> Result:
        """Wait for a task of this loop; returns its result. An interrupt cancels the task."""
        if task.done():
            return task.result()
        if _has_a_loop():
            return super().run(_result_of(task))
        with self._borrowed():
            return self._finish(task)

    def _finish(self, task: asyncio.Task[Result]) -> Result:
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            task.cancel()
            raise

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        """Run the loop in this thread instead of its own, inside the context."""
        self._used_s = time.monotonic()
        while not self._turn.acquire(blocking=False):
            self._loop.call_soon_threadsafe(self._stop_serving)
            if self._turn.acquire(timeout=_ASK_AGAIN_S):
                break
        try:
            yield
        finally:
            self._used_s = time.monotonic()
            self._turn.release()

    def _stop_serving(self) -> None:
        """Stop the loop if its own thread runs it. Must be called on the loop."""
        if threading.current_thread() is self._thread:
            self._loop.stop()

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            left_s = self._used_s + _IDLE_S - time.monotonic()
            if left_s > 0:
                self._is_closing.wait(left_s)
                continue
            with self._turn:
                self._loop.run_forever()


def _has_a_loop() -> bool:
    """Return whether an event loop runs in this thread, which then can run no other."""
    return asyncio._get_running_loop() is not None


async def _two_turns() -> None:
    """Let the loop run for two turns: this coroutine ends in the first, and the loop notices in the
    second. A coroutine writes its request in the first turn, and asks for its answer in the second.
    """


async def _result_of(task: asyncio.Task[Result]) -> Result:
    return await task


class _Sent(Generic[Result]):
    """A started coroutine whose request is sent, and whose answer is still to come."""

    def __init__(self, loop: CallerLoop, task: asyncio.Task[Result]) -> None:
        self._loop = loop
        self._task = task

    def result(self) -> Result:
        """Wait for the result, or raise the coroutine's error."""
        return self._loop.finish(self._task)

    def cancel(self) -> None:
        """Cancel the coroutine."""
        self._loop.post(self._task.cancel)
