"""Reads the requests of long-lived streams, so that a stopping server can end waiting streams at
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from kvplane.errors import PlaneUnavailableError

RequestT = TypeVar("RequestT")


class RequestStreams:
    """The open streams of one service."""

    def __init__(self, plane: str) -> None:
        """``plane``: the name in the error of a stopping server, such as "control plane"."""
        self.plane = plane
        self.waiting: set[asyncio.Task[Any]] = set()
        """Tasks that wait for a request."""
        self.stopping = asyncio.Event()

    def stop(self) -> None:
        """End streams that wait for a request now, and the others after their current answer."""
        self.stopping.set()
        for task in self.waiting:
            task.cancel()

    async def next(self, requests: AsyncIterator[RequestT]) -> RequestT | None:
        """Return the next of the requests of the stream that the current task serves; None at the
        end of the stream.

        Raises PlaneUnavailableError once the service stops, and the errors of ``requests``.
        """
        if self.stopping.is_set():
            raise stopping_error(self.plane)
        task = asyncio.current_task()
        assert task is not None
        self.waiting.add(task)
        try:
            return await requests.__anext__()
        except StopAsyncIteration:
            return None
        except asyncio.CancelledError:
            if not self.stopping.is_set():
                raise
            task.uncancel()
            raise stopping_error(self.plane) from None
        finally:
            self.waiting.discard(task)


def stopping_error(plane: str) -> PlaneUnavailableError:
    """Return the error that ends a stream because this process is stopping."""
    return PlaneUnavailableError(f"the {plane} is stopping", retry_delay_s=1.0)
