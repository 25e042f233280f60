"""uvicorn's HTTP/1.1 with two more bounds: on the time of a head, and on small parts of a body."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# A body has at most so many parts of less than so many bytes: each takes as long as a large one.
_MOST_SMALL: Final = 1024
_SMALL_BYTES: Final = 64


class BoundedProtocol(H11Protocol):
    """Closes connections whose next request is not there within the idle timeout."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.conn = _Connection(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _unset_keepalive_if_required(self) -> None:
        # uvicorn stops waiting at the first byte of a head.
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            super()._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request, or end the connection if its response has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()


class _Connection(h11.Connection):
    """Refuses bodies in many small parts, such as chunks of one byte."""

    _num_small = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_small = 0
        elif isinstance(event, h11.Data):
            self._num_small += len(event.data) < _SMALL_BYTES
            if self._num_small > _MOST_SMALL:
                raise h11.RemoteProtocolError("the body has too many small parts")
        return event
