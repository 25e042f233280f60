"""Follows the indexes of pools, for as long as the router runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, MutableMapping, MutableSet
from typing import Final

from kvplane.clients.control_client import ControlClient
from kvplane.errors import KvplaneError, PoolNotFoundError
from kvplane.prefixes import CaughtUp

from .pool_index import PoolIndex

_LOGGER: Final = logging.getLogger(__name__)
_AGAIN_S: Final = 1.0
_LOOK_S: Final = 1.0
_LOOK_TIMEOUT_S: Final = 5.0


class PoolFeeds:
    """Puts an index into ``indexes`` for each pool that could be followed. The index stays while
    the control plane is away: for routing, old data is better than none. ``lost`` has the pools of
    which the control plane says that no session can be opened on them.
    """

    def __init__(
        self,
        control: ControlClient,
        namespace: str,
        indexes: MutableMapping[str, PoolIndex],
        lost: MutableSet[str],
    ) -> None:
        self._control = control
        self._namespace = namespace
        self._indexes = indexes
        self._lost = lost
        self._tasks: list[asyncio.Task[None]] = []
        self._caught_up: dict[str, asyncio.Event] = {}

    @property
    def caught_up(self) -> dict[str, bool]:
        """Return for each pool whether its whole index was known at some time."""
        return {pool: event.is_set() for pool, event in self._caught_up.items()}

    def follow(self, pools: Iterable[str]) -> None:
        """Follow these pools from now on. May be called once."""
        for pool in sorted(set(pools)):
            self._caught_up[pool] = asyncio.Event()
            self._tasks += map(asyncio.create_task, (self._follow(pool), self._look(pool)))

    async def wait(self, timeout_s: float) -> None:
        """Return when all pools are caught up, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                for event in self._caught_up.values():
                    await event.wait()
        except TimeoutError:
            missing = [pool for pool, done in self.caught_up.items() if not done]
            _LOGGER.warning("not followed yet pools=%s", ",".join(missing))

    async def stop(self) -> None:
        """End all feeds."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self, pool: str) -> None:
        """Keep ``lost`` right. A control plane that does not answer changes nothing."""
        while True:
            try:
                found = await self._control.get_pool(pool, timeout_s=_LOOK_TIMEOUT_S)
                self._tell(pool, is_lost=not found.ready)
            except PoolNotFoundError:  # none of its data planes has registered
                self._tell(pool, is_lost=True)
            except KvplaneError as error:
                _LOGGER.debug("pool=%s is not described: %s", pool, error.reason)
            await asyncio.sleep(_LOOK_S)

    def _tell(self, pool: str, *, is_lost: bool) -> None:
        if is_lost != (pool in self._lost):
            (self._lost.add if is_lost else self._lost.discard)(pool)
            _LOGGER.info("pool=%s is %s", pool, "lost" if is_lost else "ready")

    async def _follow(self, pool: str) -> None:
        while True:
            try:
                await self._follow_once(pool)
            except KvplaneError as error:
                _LOGGER.warning("pool=%s is not followed: %s", pool, error.reason)
            await asyncio.sleep(_AGAIN_S)

    async def _follow_once(self, pool: str) -> None:
        description = await self._control.wait_ready(pool)
        layout = description.layout
        index = PoolIndex(layout.block_size_tokens)
        async for event in self._control.watch_prefixes(pool, self._namespace):
            index.apply(event)
            if isinstance(event, CaughtUp) and self._indexes.get(pool) is not index:
                self._indexes[pool] = index  # only now: old data beats a part of the new
                self._caught_up[pool].set()
                _LOGGER.info("follows pool=%s blocks=%d", pool, index.num_blocks)
