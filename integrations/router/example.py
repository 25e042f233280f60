"""A router that sends each prompt to the pool that has most of it cached.

It follows the index of every pool (`WatchPrefixes`), so a decision costs no call. Start planes,
then:

    python integrations/router/example.py 127.0.0.1:50051 1,2,3,4,5,6,7,8,9
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from kvplane import ControlClient
from kvplane.prefixes import BlocksRemoved, BlocksStored, CaughtUp, IndexCleared

NO_PARENT = bytes(16)


class PoolIndex:
    """The cached prefixes of one pool: the block that follows each prefix with the same tokens."""

    def __init__(self, block_size_tokens: int) -> None:
        self.block_size_tokens = block_size_tokens
        self.caught_up = asyncio.Event()
        self._next: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._tiers: dict[bytes, set[int]] = {}

    async def follow(self, control: ControlClient, pool_id: str) -> None:
        """Apply the pool's changes until cancelled."""
        async for event in control.watch_prefixes(pool_id):
            match event:
                case BlocksStored(blocks):
                    for block in blocks:
                        self._next[block.parent_hash, tuple(block.token_ids)] = block.block_hash
                        self._tiers.setdefault(block.block_hash, set()).add(block.tier)
                case BlocksRemoved(blocks):
                    for block_hash, tier in blocks:
                        self._tiers.get(block_hash, set()).discard(tier)
                case IndexCleared():
                    self._next.clear()
                    self._tiers.clear()
                case CaughtUp():
                    self.caught_up.set()

    def num_cached_tokens(self, prompt: Sequence[int]) -> int:
        """Return the number of leading tokens of ``prompt`` that are cached, in whole blocks."""
        size, at, found = self.block_size_tokens, NO_PARENT, 0
        for first in range(0, len(prompt) - size + 1, size):
            at = self._next.get((at, tuple(prompt[first : first + size])), b"")
            if not self._tiers.get(at):
                break
            found += size
        return found


class Router:
    """Chooses among the pools of a control plane."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._pools: dict[str, PoolIndex] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Follow every pool there is; returns when all are known."""
        for pool_id in await self._control.list_pools():
            pool = await self._control.wait_ready(pool_id)
            layout = pool.layout
            index = self._pools[pool_id] = PoolIndex(layout.block_size_tokens)
            self._tasks.append(asyncio.create_task(index.follow(self._control, pool_id)))
        await asyncio.gather(*(index.caught_up.wait() for index in self._pools.values()))

    def choose(self, prompt: Sequence[int]) -> tuple[str, int]:
        """Return the pool with most of the prompt, and its number of tokens; the first by name if
        no pool has any.
        """
        found = {name: pool.num_cached_tokens(prompt) for name, pool in self._pools.items()}
        return max(sorted(found.items()), key=lambda entry: entry[1])

    async def stop(self) -> None:
        """End the feeds."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def main(address: str, prompt: Sequence[int]) -> None:
    """Route one prompt."""
    async with ControlClient(address) as control:
        router = Router(control)
        await router.start()
        pool_id, num_tokens = router.choose(prompt)
        print(f"pool {pool_id} has {num_tokens} of {len(prompt)} tokens")
        await router.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], [int(token) for token in sys.argv[2].split(",")]))
