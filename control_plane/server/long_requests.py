"""Requests that take long: one at a time, in pieces between which other sessions are served."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from control_plane.planning.steps.pieces import Pieces

TURNS_OF_A_CALL: Final = 2
"""Turns of the event loop that a call takes from its arrival to its answer."""


class LongRequests:
    """The sessions whose requests take long. Each runs to its end, whoever waits for it."""

    def __init__(self) -> None:
        self._running: dict[int, asyncio.Task[Any]] = {}  # by session
        self._lane = asyncio.Lock()

    async def wait(self, session_id: int) -> None:
        """Until the session has no such request: its requests run one after another."""
        while (task := self._running.get(session_id)) is not None:
            await asyncio.wait([task])

    async def run(self, session_id: int, pieces: Pieces[Any]) -> Any:
        """What the pieces come to, or what they raise. The session has no other such request."""
        task = self._running[session_id] = asyncio.create_task(self._run(session_id, pieces))
        task.add_done_callback(_forget_error)
        return await asyncio.shield(task)

    async def _run(self, session_id: int, pieces: Pieces[Any]) -> Any:
        try:
            async with self._lane:
                while True:
                    try:
                        next(pieces)
                    except StopIteration as end:
                        return end.value
                    for _ in range(TURNS_OF_A_CALL):
                        await asyncio.sleep(0)
        finally:
            del self._running[session_id]


def _forget_error(task: asyncio.Task[Any]) -> None:
    """Whoever asked may have gone: the error is told to nobody then."""
    if not task.cancelled():
        task.exception()
