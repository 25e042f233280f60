"""Runs an engine's steps in a thread of its own, for requests that come from an event loop.

    event loop   stream() ──submission──►  thread   submit, step, step, ...
                 ◄──deltas, output, error──┘

A request whose stream is closed before its end is aborted. An exception that is not a KvplaneError
ends the thread: the engine's memory may be wrong then.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import PriorityQueue
from threading import Thread
from typing import Final, Protocol

from kvplane.errors import (
    InternalError,
    KvplaneError,
    PlaneUnavailableError,
)
from kvplane.serving.limits.open_requests import OpenRequests

from ..request import Delta, RequestOutput, SamplingParams

_LOGGER: Final = logging.getLogger(__name__)

# Seconds of checking prompts between two steps, while others wait for their next token.
_CHECK_S: Final = 0.01

Event = Delta | RequestOutput | KvplaneError
Read = Callable[[], Sequence[int]]


CHARACTERS_PER_S: Final = 250_000
"""Roughly what a tokenizer reads; it decides who may overtake, and nothing else."""


class Engine(Protocol):
    """The methods of ``engine.LLM`` that the worker needs."""

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> str: ...

    def step(self) -> list[Delta]: ...

    @property
    def has_work(self) -> bool: ...

    def take_output(self, request_id: str) -> RequestOutput | None: ...

    def abort(self, request_id: str) -> None: ...

    def give_up(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Submission:
    """A request for the engine."""

    token_ids: Sequence[int]
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    request_id: str = ""
    is_closed: bool = False

    def deliver(self, *events: Event) -> None:
        def put() -> None:
            for event in events:
                self.events.put_nowait(event)

        with suppress(RuntimeError):  # the loop is closed, and nobody listens
            self.loop.call_soon_threadsafe(put)


class EngineWorker:
    """Runs an engine in a thread, after ``start``. At most ``max_requests`` are open. With several
    keys, ``num_keys``, none can have all of them.
    """

    def __init__(self, engine: Engine, max_requests: int, num_keys: int = 0) -> None:
        self._engine = engine
        self._reader = PromptReader()
        self._wakes = threading.Condition()
        self._incoming: deque[_Submission] = deque()
        self._open: dict[str, _Submission] = {}
        self._open_requests = OpenRequests(max_requests, num_keys)
        self._is_stopping = False
        self._when_failed: Callable[[], None] = lambda: None
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_open(self) -> int:
        """Number of unanswered requests."""
        return len(self._open_requests)

    @property
    def is_alive(self) -> bool:
        """Return whether requests are served."""
        return self._thread.is_alive() and not self._is_stopping

    @property
    def has_failed(self) -> bool:
        """Return whether the thread has ended by an exception."""
        return self._has_failed

    def when_failed(self, call: Callable[[], None]) -> None:
        """Have ``call`` made, on any thread, once ``has_failed`` and no request is open."""
        with self._wakes:
            self._when_failed = call
            if self._has_failed:
                call()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def give_up(self) -> None:
        """Stop waiting for planes that are away: requests that need them fail."""
        self._engine.give_up()

    def stop(self) -> None:
        """Fail all open requests, and end the thread after its step; waits for planes end."""
        with self._wakes:
            self._is_stopping = True
            self._wakes.notify()
        self.give_up()
        self._thread.join()

    async def stream(
        self, read: Read, params: SamplingParams, *, num_characters: int = 0, key: str = ""
    ) -> AsyncGenerator[Delta | RequestOutput, None]:
        """Yield what each step adds to a request, and finally its answer. Closing aborts it.
        ``read`` makes its prompt, of ``num_characters``, in the tokenizer's thread.

        Raises the error of a prompt that cannot be served, QuotaExceededError when too many are
        open, PlaneUnavailableError when the engine stops.
        """
        self._open_requests.begin(key)
        submission = _Submission((), params, asyncio.get_running_loop())
        is_done = False
        try:
            submission.token_ids = await self._read(read, num_characters)
            with self._wakes:
                if not self.is_alive:
                    raise PlaneUnavailableError("the engine is stopping")
                self._incoming.append(submission)
                self._wakes.notify()
            while True:
                event = await submission.events.get()
                is_done = not isinstance(event, Delta)
                if isinstance(event, KvplaneError):
                    raise event
                yield event
                if is_done:
                    return
        finally:
            self._open_requests.end(key)
            submission.is_closed = True
            if submission.request_id and not is_done:
                self._engine.abort(submission.request_id)
                with self._wakes:
                    self._wakes.notify()

    async def _read(self, read: Read, num_characters: int) -> Sequence[int]:
        try:
            return await self._reader.read(read, num_characters)
        except KvplaneError:
            raise
        except Exception as error:  # a tokenizer or a chat template may raise anything
            _LOGGER.exception("a prompt was not read")
            raise InternalError(f"the prompt was not read: {type(error).__name__}") from None

    # The thread.

    def _run(self) -> None:
        has_failed = True
        try:
            while self._take():
                self._step()
            has_failed = False
        except Exception:
            _LOGGER.exception("the engine failed")
        finally:
            self._end(has_failed)

    def _end(self, has_failed: bool) -> None:
        with self._wakes:
            self._is_stopping = True
            self._has_failed = has_failed
            for submission in (*self._incoming, *self._open.values()):
                submission.deliver(PlaneUnavailableError("the engine is stopping"))
            if has_failed:
                self._when_failed()

    def _take(self) -> bool:
        """Wait for work and submit some of the new requests. Returns False when stopped."""
        with self._wakes:
            while not (self._is_stopping or self._incoming or self._engine.has_work):
                self._wakes.wait()
            if self._is_stopping:
                return False
        until_s = time.monotonic() + _CHECK_S
        while self._incoming and time.monotonic() < until_s:
            self._submit(self._incoming.popleft())
        return True

    def _submit(self, submission: _Submission) -> None:
        try:
            request_id = self._engine.submit(submission.token_ids, submission.params)
        except KvplaneError as error:
            submission.deliver(error)
            return
        self._open[request_id] = submission
        submission.request_id = request_id
        if submission.is_closed:  # before this: the later of the two aborts it
            self._engine.abort(request_id)

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except KvplaneError as error:
            self._fail_all(error)
            return
        of_requests: dict[str, list[Event]] = {}
        for delta in deltas:
            of_requests.setdefault(delta.request_id, []).append(delta)
        for request_id, events in of_requests.items():
            output = self._engine.take_output(request_id)
            if output is not None:
                events.append(output if output.error is None else output.error)
            submission = self._open.get(request_id)  # None: it was failed, and is aborted now
            if submission is not None:
                submission.deliver(*events)
                if output is not None:
                    del self._open[request_id]

    def _fail_all(self, error: KvplaneError) -> None:
        """Fail all requests, since the engine could not recover. Later ones are tried again."""
        _LOGGER.error("step failed reason=%s: %s", error.reason, error.message)
        failed, self._open = self._open, {}
        with self._wakes:  # before a client learns of it and asks again
            came, self._incoming = self._incoming, deque()
        for request_id, submission in failed.items():
            self._engine.abort(request_id)
            submission.deliver(error)
        for submission in came:
            submission.deliver(error)


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
