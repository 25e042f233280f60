"""Publishes batches of events, and sends them again, as vLLM's ``ZmqEventPublisher`` does."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from .config import EventsSettings
from .wire import CLEARED, Event

# Bounds of what can be sent again.
NUM_KEPT: Final = 10_000
KEPT_BYTES: Final = 64 << 20
# Batches that wait for a slow subscriber, which misses those after them.
_NUM_UNSENT: Final = 4096
_MAX_RECEIVED_BYTES: Final = 1024  # of a subscriber's topic, or of a request
_END: Final = b"\xff" * 8


class Publisher:
    """The sockets of events and of replays. Raises OSError when an endpoint cannot be bound.

    ``wants_snapshot`` is set when somebody has missed batches which no replay has.
    """

    def __init__(self, config: EventsSettings) -> None:
        self.wants_snapshot = asyncio.Event()
        self._topic = config.topic.encode()
        self._is_map = config.format == "map"
        # Consumers drop batches whose numbers they have passed, so a restart must not go back.
        self._seqs = itertools.count(time.time_ns() // 1000)
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._is_whole = True  # whether what is kept begins with the last CLEARED
        self._context = zmq.asyncio.Context()
        # A PUB to subscribers, which also tells that there is a new one.
        self._events = self._bound(zmq.XPUB, config.bind, "--bind", _NUM_UNSENT)
        self._events.setsockopt(zmq.XPUB_VERBOSE, 1)
        # A ROUTER drops what is above its mark, so a whole replay must fit.
        self._replays = self._bound(zmq.ROUTER, config.replay, "--replay", NUM_KEPT + 1)

    def _bound(self, kind: int, endpoint: str, option: str, high_water_mark: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_RECEIVED_BYTES)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            if endpoint:
                socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(f"{option} {endpoint} cannot be bound: {error.strerror}") from error
        return socket

    async def publish(self, events: Sequence[Event]) -> None:
        """Publish a batch."""
        if events == [CLEARED]:
            self._kept.clear()
            self._kept_bytes, self._is_whole = 0, True
            self.wants_snapshot.clear()
        batch = events if self._is_map else [list(event.values()) for event in events]
        payload = msgspec.msgpack.encode([time.time(), batch, 0])
        seq = next(self._seqs).to_bytes(8, "big")
        self._kept.append((seq, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > NUM_KEPT or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
            self._is_whole = False
        await self._events.send_multipart([self._topic, seq, payload])

    async def hear_subscribers(self) -> None:
        """Have a snapshot wanted for each new subscriber, until cancelled."""
        while True:
            if (await self._events.recv()).startswith(b"\x01"):
                self.wants_snapshot.set()

    async def serve_replays(self) -> None:
        """Answer requests for replays until cancelled."""
        while True:
            identity, *_, first = await self._replays.recv_multipart()
            # Numbers of 8 bytes, big endian, are ordered as these are.
            batches = [each for each in self._kept if each[0] >= first]
            if not self._is_whole and first < self._kept[0][0]:
                self.wants_snapshot.set()
            for seq, payload in (*batches, (_END, b"")):
                await self._replays.send_multipart([identity, b"", seq, payload])
