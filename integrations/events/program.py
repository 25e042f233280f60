"""``python -m kvplane.integrations.events``: publishes until a signal, which ends it at once."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from kvplane.clients.control_client import ControlClient
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.prefixes import BlocksRemoved, BlocksStored, CaughtUp, IndexCleared, StoredBlock
from kvplane.serving.observability import logs
from kvplane.serving.settings import EXIT_BAD_SETTINGS, log_settings, parse

from .config import EventsSettings
from .publisher import Publisher
from .wire import CLEARED, Event, parents_first, removed, stored

_LOGGER: Final = logging.getLogger("events")
# How long the control plane may be away before that is logged, and the feed begins again.
_PATIENCE_S: Final = 3.0
_AGAIN_S: Final = 1.0
_MOST_BLOCKS: Final = 1024  # of a batch


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
