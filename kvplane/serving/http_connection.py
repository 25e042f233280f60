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
"""Within this a client takes ``TAKEN_BYTES`` of its answer, or what is left of it."""
TAKEN_BYTES: Final = 48 << 10
LINGER_S: Final = 2.0
"""What is left of a request that was answered early is passed over until so long nothing comes. A
client that is cut off at once may not see the answer."""
LONGEST_LINGER_S: Final = 30.0
"""And no longer than this."""
_HIGH_BYTES: Final = 64 << 10
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
        self._lingers_until_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, if there is room for the connection."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_HIGH_BYTES)  # TLS has others
        if len(self.connections) > self._max_connections:
            self._cut("too_many")
        else:
            self._start(HEAD_S, "no_request")

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop()
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self._timer is None and self.conn.their_state is h11.IDLE:
            self._start(HEAD_S, "no_request")
        elif self._lingers:
            self._linger()
        super().data_received(data)

    def handle_events(self) -> None:
        """Called by ``data_received``, and when an answer is sent and the next request is there."""
        super().handle_events()
        if self.cycle is not self._begun:
            self._begun = self.cycle
            self._stop()
            if not self.flow.write_paused:
                self._unwatch()
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
        if self._stall is None:
            self._watch()
        super().on_response_complete()
        is_left = self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY
        if is_left and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._lingers_until_s = self.loop.time() + LONGEST_LINGER_S
            self._linger()

    def pause_writing(self) -> None:
        """The client does not read as fast as there is something to send."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._unwatch()
        if self._begun is not None and self._begun.response_complete:
            self._watch()  # nothing more is sent that would be waited for

    def _watch(self) -> None:
        """Cut the client off if it does not go on to take what there is for it."""
        self._unwatch()
        num_bytes = self._num_unread()
        if num_bytes:
            self._stall = self.loop.call_later(STALL_S, self._watched, num_bytes)

    def _watched(self, num_bytes: int) -> None:
        num_unread = self._num_unread()
        if num_unread and num_bytes - num_unread < TAKEN_BYTES:
            self._cut("not_read")
        else:
            self._watch()

    def _unwatch(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _num_unread(self) -> int:
        """Bytes that wait to be sent; under TLS most of them wait in the transport below."""
        below = getattr(getattr(self.transport, "_ssl_protocol", None), "_transport", None)
        transports = [each for each in (self.transport, below) if each is not None]
        return sum(each.get_write_buffer_size() for each in transports)

    def _linger(self) -> None:
        left_s = self._lingers_until_s - self.loop.time()
        self._start(min(LINGER_S, left_s), "unread_body")
        self._lingers = True

    def _start(self, seconds: float, why: str) -> None:
        self._stop()
        self._timer = self.loop.call_later(seconds, self._cut, why)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._lingers = False

    def _cut(self, why: str) -> None:
        self._cut_by(why)
        self.transport.abort()
