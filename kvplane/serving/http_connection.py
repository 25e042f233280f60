"""A connection of an HTTP server: no client keeps one, or what belongs to it, for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S: Final = 10.0
"""Within this a connection's first request comes whole, but for its body, and each later one once
it has begun."""
STALL_S: Final = 30.0
"""Within this a client takes of its answer what keeps more from being sent: some 48 KiB."""
LINGER_S: Final = 2.0
"""So long what is left of a request is passed over that was answered early. A client that is cut
off at once may not see the answer."""
Cut = Callable[[str], None]


class HttpConnection(H11Protocol):
    """Closes connections that are too many, whose request does not come, or whose client does not
    read its answer. That a body comes is seen to by who reads it.
    """

    def __init__(self, max_connections: int, cut: Cut, *arguments: Any, **named: Any) -> None:
        """``cut`` is called with why a connection was closed."""
        super().__init__(*arguments, **named)
        self._max_connections = max_connections
        self._cut_by = cut
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._begun: Any = None  # the request that was seen last
        self._lingers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, if there is room for the connection."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._cut("too_many")
        else:
            self._start(HEAD_S, "no_request")

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        for timer in (self._timer, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self._timer is None and self.conn.their_state is h11.IDLE:
            self._start(HEAD_S, "no_request")
        super().data_received(data)

    def handle_events(self) -> None:
        """Called by ``data_received``, and when an answer is sent and the next request is there."""
        super().handle_events()
        if self.cycle is not self._begun:
            self._begun = self.cycle
            self._stop()
        elif self._lingers and self.conn.their_state is not h11.SEND_BODY:
            self._start(HEAD_S, "no_request")  # the rest has come: the next one may

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._cut_by("not_http")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # of the rest of a request that is answered already
            self.transport.abort()

    def on_response_complete(self) -> None:
        """The answer is sent: pass over what is left of the request, but not for ever."""
        super().on_response_complete()
        is_left = self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY
        if is_left and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._start(LINGER_S, "unread_body")
            self._lingers = True

    def pause_writing(self) -> None:
        """The client does not read as fast as there is something to send."""
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._stall = loop.call_later(STALL_S, self._cut, "not_read")

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _start(self, seconds: float, why: str) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._cut, why)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._lingers = False

    def _cut(self, why: str) -> None:
        self._cut_by(why)
        self.transport.abort()
