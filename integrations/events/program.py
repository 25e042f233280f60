"""``python -m kvplane.integrations.events``: publishes until a signal, which ends it at once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from kvplane.clients.control_client import ControlClient
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.prefixes import BlocksRemoved, BlocksStored, CaughtUp, IndexCleared, StoredBlock
from kvplane.serving.observability import logs
from kvplane.serving.settings import EXIT_BAD_SETTINGS, log_settings, parse

from .config import EventsSettings
from .wire import CLEARED, Event, parents_first, removed, stored

_LOGGER: Final = logging.getLogger("events")
# How long the control plane may be away before that is logged, and the feed begins again.
_PATIENCE_S: Final = 3.0
_AGAIN_S: Final = 1.0
_MOST_BLOCKS: Final = 1024  # of a batch
# Bounds of what can be sent again.
NUM_KEPT: Final = 10_000
KEPT_BYTES: Final = 64 << 20
# Batches that wait for a slow subscriber, which misses those after them.
_NUM_UNSENT: Final = 4096
_MAX_RECEIVED_BYTES: Final = 1024  # of a subscriber's topic, or of a request
_END: Final = b"\xff" * 8


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program; return its exit code: 1 cannot serve, 2 bad settings."""
    config = parse(EventsSettings, "events", argv, environ, "python -m kvplane.integrations.events")
    logs.setup(config.log_level, config.log_format)
    log_settings(config, _LOGGER)
    try:
        asyncio.run(_publish(config))
    except (KvplaneError, OSError) as error:
        print(f"events: error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS if isinstance(error, InvalidRequestError) else 1
    return 0


async def _publish(config: EventsSettings) -> None:
    publisher = Publisher(config)
    async with ControlClient(config.control_plane, tls=config.client_tls) as control:
        bridge = Bridge(config, control, publisher)
        _LOGGER.info("publishes bind=%s replay=%s", config.bind, config.replay or "none")
        await asyncio.gather(
            bridge.follow(),
            bridge.begin_again_when_wanted(),
            publisher.hear_subscribers(),
            publisher.serve_replays(),
        )


@dataclass
class Bridge:
    """Publishes what is cached in a namespace of a pool. A feed of it begins with CLEARED and a
    snapshot: a new feed is all that somebody needs who has just subscribed, or missed something.
    """

    config: EventsSettings
    control: ControlClient
    publisher: Publisher
    _feed: asyncio.Timeout | None = None  # None until its snapshot is published

    async def begin_again_when_wanted(self) -> None:
        """Begin feeds again, at most one each second, until cancelled."""
        while True:
            await self.publisher.wants_snapshot.wait()
            if self._feed is not None:
                self._feed.reschedule(0)
                self._feed = None
            await asyncio.sleep(_AGAIN_S)

    async def follow(self) -> None:
        """Publish one feed after the other until cancelled."""
        while True:
            try:
                async with asyncio.timeout(None) as feed:
                    await self._publish(feed)
            except TimeoutError:
                continue
            except KvplaneError as error:
                _LOGGER.warning("pool=%s is not followed: %s", self.config.pool, error.reason)
            finally:
                self._feed = None
            await asyncio.sleep(_AGAIN_S)

    async def _publish(self, feed: asyncio.Timeout) -> None:
        """Publish a feed until it breaks, or ``feed`` is over."""
        config, publish = self.config, self.publisher.publish
        changes: list[Event] = []
        snapshot: dict[tuple[bytes, int], StoredBlock] = {}
        in_snapshot = True
        watch = self.control.watch_prefixes(config.pool, config.namespace, timeout_s=_PATIENCE_S)
        async with aclosing(watch) as events:
            async for event in events:
                match event:
                    case IndexCleared():
                        in_snapshot, snapshot, changes = True, {}, []
                        await publish([CLEARED])
                    case BlocksStored(blocks) if in_snapshot:
                        snapshot |= {(each.block_hash, each.tier): each for each in blocks}
                    case BlocksRemoved(blocks) if in_snapshot:
                        for key in blocks:
                            snapshot.pop(key, None)
                    case CaughtUp() if in_snapshot:
                        await self._publish_snapshot(snapshot.values())
                        in_snapshot, snapshot, self._feed = False, {}, feed
                    case BlocksStored(blocks):
                        changes += stored(blocks, config.media)
                    case BlocksRemoved(blocks):
                        changes += removed(blocks, config.media)
                    case CaughtUp() if changes:
                        await publish(changes)
                        changes = []

    async def _publish_snapshot(self, blocks: Iterable[StoredBlock]) -> None:
        ordered = parents_first(blocks)
        for i in range(0, len(ordered), _MOST_BLOCKS):
            part = ordered[i : i + _MOST_BLOCKS]
            await self.publisher.publish(stored(part, self.config.media))
            await asyncio.sleep(0)  # for replays, and for signals
        _LOGGER.info("follows pool=%s blocks=%d", self.config.pool, len(ordered))


class Publisher:
    """The sockets of events and of replays: it publishes batches, and sends them again, as vLLM's
    ``ZmqEventPublisher`` does. Raises OSError when an endpoint cannot be bound.

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
