"""What consumers of vLLM's KV events know of a pool, whatever restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bridged import Bridge, Consumer, Held, cached

from kvplane import ControlClient, ops
from tests.helpers.both_planes import LAYOUT, POOL, Planes, run_step

BLOCK = LAYOUT.block_size_tokens
EVENTS = "kvplane.integrations.events"


class Pool:
    """A pool of 16 blocks, a session, and a bridge."""

    def __init__(self, planes: Planes, control: ControlClient, bridge: Bridge) -> None:
        self.planes, self.control, self.bridge = planes, control, bridge

    async def cache(self, *prompts: list[int]) -> Held:
        """Compute prompts one after another; return what is cached then."""
        await self.control.wait_ready(POOL)
        async with self.control.open_session(POOL) as session, session.open_execution() as run:
            for i, prompt in enumerate(prompts, 1):
                await run_step(session, run, ops.admit(i, prompt))
                await run_step(session, run, ops.free([i]))
        return await self.cached()

    async def cached(self) -> Held:
        return await cached(self.control, POOL)


def prompt(seed: int, num_blocks: int) -> list[int]:
    return [1000 * seed + i for i in range(num_blocks * BLOCK + 1)]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    settings = {"num_device_blocks": 16, "num_host_blocks": 0}
    async with Planes(tmp_path, data=settings) as planes, ControlClient(planes.address) as control:
        with Bridge(tmp_path, planes.address, "--pool", POOL) as bridge:
            yield Pool(planes, control, bridge)


async def test_a_stored_prompt_is_told_with_its_tokens_and_parents_first(pool: Pool) -> None:
    async with Consumer(pool.bridge.port) as consumer:
        held = await pool.cache(prompt(1, 3), prompt(2, 2))
        await consumer.until(held)
        assert sorted(tokens for _, tokens in held.values()) == [
            tuple(prompt(seed, 3)[i * BLOCK : (i + 1) * BLOCK])
            for seed, num_blocks in ((1, 3), (2, 2))
            for i in range(num_blocks)
        ]
        assert consumer.kinds[0] == "AllBlocksCleared"


async def test_an_evicted_block_is_removed(pool: Pool) -> None:
    async with Consumer(pool.bridge.port) as consumer:
        first = await pool.cache(prompt(0, 4))
        await consumer.until(first)
        held = await pool.cache(*(prompt(seed, 4) for seed in range(1, 5)))
        await consumer.until(held)
        assert "BlockRemoved" in consumer.kinds
        assert not held.items() >= first.items()


async def test_what_is_cached_is_told_again_after_any_restart(pool: Pool) -> None:
    async with Consumer(pool.bridge.port) as consumer:
        held = await pool.cache(prompt(1, 3))
        await consumer.until(held)
        consumer.kinds.clear()
        await pool.planes.restart_control()
        await pool.control.wait_ready(POOL)
        while "BlockStored" not in consumer.kinds:
            await consumer.take()
        assert consumer.kinds[0] == "AllBlocksCleared"
        assert consumer.held == await pool.cached() == held
        await pool.planes.restart()
        await consumer.until({})
        await consumer.until(await pool.cache(prompt(2, 2)))
