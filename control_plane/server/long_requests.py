"""Requests that take long: one at a time, in pieces between which other sessions are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from control_plane.steps.pieces import Pieces

TURNS_OF_A_CALL: Final = 2
"""Turns of the event loop that a call takes from its arrival to its answer."""


class LongRequests:
    """The sessions whose requests take long. What has begun runs to its end, whoever waits for it;
    what has not is dropped with its caller, who could make many such requests pile up.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        """``ended`` is called when a request has ended, even if its caller has gone."""
        self._ended = ended
        self._running: dict[int, asyncio.Task[Any]] = {}  # by session
        self._lane = asyncio.Lock()
        self._begun: int | None = None  # the session whose request has the lane

    def is_running(self, session_id: int) -> bool:
        """Whether the session has such a request."""
        return session_id in self._running

    async def wait(self, session_id: int) -> None:
        """Until the session has no such request: its requests run one after another."""
        while (task := self._running.get(session_id)) is not None:
            await asyncio.wait([task])

    async def run(self, session_id: int, pieces: Pieces[Any]) -> Any:
        """What the pieces come to, or what they raise. The session has no other such request."""
        task = self._running[session_id] = asyncio.create_task(self._run(session_id, pieces))
        # Not at the end of the task: one that is cancelled at once does not even begin.
        task.add_done_callback(partial(self._forget, session_id))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._begun != session_id:
                task.cancel()
            raise

    async def _run(self, session_id: int, pieces: Pieces[Any]) -> Any:
        async with self._lane:
            self._begun = session_id
            try:
                return await _run_all(pieces)
            finally:
                self._begun = None

    def _forget(self, session_id: int, task: asyncio.Task[Any]) -> None:
        del self._running[session_id]
        if not task.cancelled():
            task.exception()  # whoever asked may have gone: it is told to nobody then
            self._ended()


async def _run_all(pieces: Pieces[Any]) -> Any:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
        for _ in range(TURNS_OF_A_CALL):
            await asyncio.sleep(0)
