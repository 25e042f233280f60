"""A bidirectional stream used for request and answer.

Invariant: a received message answers the last one sent, or is news that the caller passes over.
Whatever might break that (an error, a cancelled wait) drops the call, and another must be opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import grpc.aio

from kvplane.errors import KvplaneError, PlaneUnavailableError
from kvplane.transport.connection import typed_errors

Request = TypeVar("Request")
Response = TypeVar("Response")
T = TypeVar("T")

_CLOSE_TIMEOUT_S: Final = 1.0


class Stream(Generic[Request, Response]):
    """A bidirectional gRPC stream, used for one request and answer at a time. ``open_call`` starts
    the RPC. Waits have no deadline of their own: cancel them.
    """

    def __init__(self, open_call: Callable[[], Any]) -> None:
        self._open_call = open_call
        self._call: Any = None
        self._reading: asyncio.Future[Any] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether there is a call that, as far as this side knows, has not ended."""
        return self._call is not None and not self._call.done()

    def open(self) -> None:
        """Start a call, which replaces any earlier one. gRPC connects by itself."""
        self.drop()
        with typed_errors():
            self._call = self._open_call()

    async def send(self, request: Request) -> None:
        """Send a request. Raises the error that the stream ended with, or PlaneUnavailableError."""
        if self._call is None:
            raise PlaneUnavailableError("the stream is not open")
        self._expect()
        await self._or_drop(self._call.write(request))

    async def receive(self) -> Response:
        """Return the next answer. Raises as ``send`` does, also when the peer ended the stream."""
        response = await self._or_drop(self._read())
        if response is grpc.aio.EOF:
            self.drop()
            raise PlaneUnavailableError("the peer ended the stream")
        return response  # type: ignore[no-any-return]

    async def arrives(self, timeout_s: float) -> bool:
        """Return whether a message, or the end, comes in time, which ``receive`` then returns."""
        if not self.is_open:
            await asyncio.sleep(timeout_s)
            return False
        done, _ = await asyncio.wait({self._expect()}, timeout=timeout_s)
        return bool(done)

    def _expect(self) -> asyncio.Future[Any]:
        """Start to read the next message, unless it is being read."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
            self._reading.add_done_callback(lambda read: read.cancelled() or read.exception())
        return self._reading

    def drop(self) -> None:
        """Cancel the stream at once; answers that have not arrived are discarded."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def close(self) -> None:
        """Half-close the stream and wait for its end; abandon it when the peer does not answer."""
        if not self.is_open:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                with typed_errors():
                    await self._call.done_writing()
                    while await self._read() is not grpc.aio.EOF:
                        pass
        except (KvplaneError, TimeoutError):
            pass
        finally:
            self.drop()

    async def _read(self) -> Any:
        reading, self._reading = self._reading, None
        return await (self._call.read() if reading is None else reading)

    async def _or_drop(self, operation: Awaitable[T]) -> T:
        try:
            with typed_errors():
                return await operation
        except BaseException:
            self.drop()
            raise
