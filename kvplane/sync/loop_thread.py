"""An asyncio loop in a thread of its own, for callers without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from importlib import import_module
from typing import Any, Protocol, TypeVar

from kvplane.errors import InvalidRequestError
from kvplane.process import check_process

Result = TypeVar("Result")
Given = TypeVar("Given", covariant=True)


class Pending(Protocol[Given]):
    """A started coroutine, as its caller sees it."""

    def result(self) -> Given:
        """Wait for the result, or raise the coroutine's error."""

    def cancel(self) -> object:
        """Cancel the coroutine."""


class LoopThread:
    """An event loop in its own thread, on which other threads run coroutines and wait."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """``name``: of the thread. ``loop``: the event loop; None for a new one. Raises
        InvalidRequestError in a process that was forked from one that has used gRPC, as do all
        methods that run something.
        """
        check_process()
        self._process_id = os.getpid()
        self._loop = _new_event_loop() if loop is None else loop
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine; ``wait`` waits for its result."""
        return asyncio.run_coroutine_threadsafe(checked(coroutine), self._loop)

    def send(self, coroutine: Coroutine[Any, Any, Result]) -> Pending[Result]:
        """Start a coroutine whose request is to travel while its caller does something else.
        ``wait``, in this thread, waits for its result.
        """
        return self.begin(coroutine)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result. An interrupt while waiting cancels it."""
        return wait(self.begin(coroutine))

    def post(self, function: Callable[[], object]) -> None:
        """Schedule ``function`` on the loop, before anything that is started later."""
        self._loop.call_soon_threadsafe(function)

    def call(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on the loop, to which gRPC binds channels; returns its result."""

        async def called() -> Result:
            return function()

        return self.run(called())

    def close(self) -> None:
        """Cancel the tasks that still run, then end the thread. Harmless when called again, and in
        a process that was forked.
        """
        if self._loop.is_closed() or self._process_id != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._is_closing.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _serve(self) -> None:
        self._loop.run_forever()


def checked(coroutine: Coroutine[Any, Any, Result]) -> Coroutine[Any, Any, Result]:
    """Return ``coroutine``. Closes it and raises InvalidRequestError in a process that was forked,
    where it would wait for ever.
    """
    try:
        check_process()
    except InvalidRequestError:
        coroutine.close()
        raise
    return coroutine


def wait(future: Pending[Result]) -> Result:
    """Wait for what ``begin`` or ``send`` returned. An interrupt while waiting cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Make a loop, of uvloop where it is installed: its sockets and callbacks cost less."""
    try:
        loop: asyncio.AbstractEventLoop = import_module("uvloop").new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    return loop


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
