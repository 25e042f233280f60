"""Reading the requests of long-lived streams, so that waiting streams can be ended at once when the
server stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from kvplane.errors import PlaneUnavailableError

RequestT = TypeVar("RequestT")


class RequestStreams:
    """The streams of one service that are open."""

    def __init__(self, plane: str) -> None:
        """``plane``: what the error of a stopping server calls it, such as "control plane"."""
        self._plane = plane
        self._waiting: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the streams that wait for a request, and the others after their current answer."""
        self._stopping.set()
        for task in self._waiting:
            task.cancel()

    async def next(self, requests: AsyncIterator[RequestT]) -> RequestT | None:
        """The next request of a stream, None at its end.

        Raises PlaneUnavailableError once ``stop`` was called, and what reading raises.
        """
        task = asyncio.current_task()
        if self._stopping.is_set() or task is None:
            raise stopping_error(self._plane)
        self._waiting.add(task)
        try:
            return await anext(requests, None)
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
            task.uncancel()
            raise stopping_error(self._plane) from None
        finally:
            self._waiting.discard(task)


def stopping_error(plane: str) -> PlaneUnavailableError:
    """The error that ends a stream when this process stops."""
    return PlaneUnavailableError(f"the {plane} is stopping", retry_delay_s=1.0)
