"""A session reads what it wrote or found cached, and nothing that another of its tenant has left in
the blocks that it got.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvplane import Execution, ops
from kvplane.errors import BlockNotWrittenError
from tests.helpers.data.plan_author import BLOCK_SIZE, POOL_ID
from tests.helpers.listed_peers import Peers, listed_peers
from tests.helpers.waiting import until

NUM_BLOCKS = 8  # all that the pool has
SECRET = range(1, NUM_BLOCKS * BLOCK_SIZE)  # fills them, but for a slot


@pytest.fixture
async def peers(tmp_path: Path) -> AsyncIterator[Peers]:
    """Another session of the tenant has filled the pool, and has ended."""
    async with listed_peers(tmp_path) as peers:
        async with peers.engine("engine-a") as engine:
            await engine.step(ops.admit(1, SECRET), spans=[(0, len(SECRET))])
            await engine.session.submit_receipts()
        shards = peers.control.core._pools[POOL_ID].shards
        await until(lambda: not shards.ended, 60)  # its blocks can be allocated again then
        yield peers


async def assert_refused(
    peers: Peers, execution: Execution, entries: ops.Numbers = 0, **read: int
) -> None:
    rejected = peers.data.metrics.rpc.rejected.values
    before = rejected["BLOCK_NOT_WRITTEN",]
    with pytest.raises(BlockNotWrittenError) as refused:
        await execution.read_blocks(1, entries, **read)
    assert refused.value.field.startswith("entries[")
    assert rejected["BLOCK_NOT_WRITTEN",] == before + 1


async def test_blocks_that_another_session_left_are_not_read(peers: Peers) -> None:
    async with peers.engine("engine-a") as engine:
        execution = engine.execution
        plan = (await engine.session.step([ops.admit(1, range(100, 120))])).plan
        await engine.execution.start(plan)
        tier = peers.data.executor.pools.device_tier
        assert bool((tier.flatten(1) != 0).any(1).all()), "nothing was left to be found"
        for block in range(3):
            await assert_refused(peers, execution, block)
        # One layer is written: it can be read alone.
        await engine._layer(0, [(0, 20)])
        await execution.read_blocks(1, range(3), num_layers=1)
        await assert_refused(peers, execution, first_layer=1, num_layers=1)
        await assert_refused(peers, execution, range(3))
        await engine._layer(1, [(0, 20)])
        (read,) = await execution.read_blocks(1, range(3))
        blocks = read.blocks.torch()
        assert bool(blocks[:, 2, :, :, :4].any(-1).all()), "the last four tokens"
        assert not bool(blocks[:, 2, :, :, 4:].any()), "what was left behind them"
