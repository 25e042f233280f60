"""One tenant's flood leaves another what it has cached, as far as its floor goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from checked_engine import Engine
from listed_peers import ROLES, Peers, listed, listed_peers
from plan_author import LAYOUT, POOL_ID

from kvplane import ops
from kvplane.serving.callers import access
from kvplane.v1 import control_pb2 as cpb

SIZE = LAYOUT.block_size_tokens
NUM_BLOCKS = 8
FLOOR = 2


@asynccontextmanager
async def engine_of(peers: Peers, name: str) -> AsyncIterator[Engine]:
    async with (
        peers.client(name) as control,
        peers.data_client(name) as data,
        await control.open_session(POOL_ID, LAYOUT) as session,
        await data.open(session.grant) as execution,
    ):
        yield Engine(session, execution)


async def compute(engine: Engine, tokens: range) -> int:
    """Compute a prompt and free it; returns how much of it was cached."""
    result = (await engine.session.step([ops.admit(1, tokens)])).raise_for_status()
    num_cached = result.results[0].admit.num_cached_tokens
    started = await engine.execution.start(result.plan)
    assert started.num_tokens == len(tokens) - num_cached
    for layer in engine.execution.layers:
        await engine._layer(layer, [(num_cached, started.num_tokens)])
    engine.session.add_receipt(engine.execution.receipt)
    await engine.step(ops.free([1]), spans=[])
    await engine.session.submit_receipts()
    return num_cached


async def test_a_flood_leaves_another_tenant_its_cached_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_RELOAD_INTERVAL_S", 0.0)
    own = range(FLOOR * SIZE + 1)
    async with (
        listed_peers(tmp_path) as peers,
        engine_of(peers, "engine-a") as victim,
        engine_of(peers, "engine-b") as greedy,
    ):
        assert await compute(victim, own) == 0
        # The floor is set while the planes run, and protects what is cached already.
        share = f"[tenants.a]\nmin_cached_share = {FLOOR / NUM_BLOCKS}\n"
        peers.access_file.write_text(listed(*ROLES) + share)
        [pool] = peers.control.core._pools.values()
        async with asyncio.timeout(10):
            while pool.floors.blocks(pool.groups) != {"a": (FLOOR, FLOOR)}:
                await asyncio.sleep(0.02)
        most = (NUM_BLOCKS - FLOOR) * SIZE
        for number in range(1, 9):
            first = 1000 * number
            assert await compute(greedy, range(first, first + most)) == 0
        result = await greedy.session.step([ops.admit(1, range(9000, 9001 + most))])
        [failure] = result.results[0].failures
        assert failure.status == cpb.OPERATION_STATUS_NEVER
        assert failure.shortage.reason == cpb.SHORTAGE_REASON_FLOOR
        counted = peers.control.metrics.refused_items.values
        assert counted["admit", "never", "floor"] == 1
        assert await compute(victim, own) == FLOOR * SIZE
