"""Each shard of a pool keeps its own part of a block in files."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path

from kvplane import ControlClient, Tensor, ops
from kvplane.prefixes import PrefixLoader
from tests.helpers.planes_in_process import PROMPT, made_up
from tests.helpers.sharded_pool import LAYOUT, POOL, ShardedPool, by_heads
from tests.helpers.tier_files import in_order
from tests.helpers.waiting import until

PATIENCE_S = 30.0
NUM_FULL = 3


def rows(layer: int, positions: Sequence[int], num_heads: int) -> Tensor:
    """Numbers [num_tokens, num_heads, 8], another multiple for each head."""
    one = made_up(layer, positions)
    numbers = memoryview(one.data).cast("f")
    all_heads = [
        (1 + head) * numbers[8 * token + i]
        for token in range(len(positions))
        for head in range(num_heads)
        for i in range(8)
    ]
    shape = (len(positions), num_heads, 8)
    return Tensor("float32", shape, array("f", all_heads).tobytes())


async def compute(
    control: ControlClient, sequence_ids: Sequence[int], num_cached: int
) -> list[bytes]:
    """Each layer's attention output of the prompt's last 4 tokens, for the last of some sequences
    that have the same prompt. ``num_cached``: tokens of it that must be found.
    """
    outputs: list[bytes] = []
    async with (
        control.open_session(POOL, LAYOUT) as session,
        session.open_execution(timeout_s=PATIENCE_S) as execution,
    ):
        for sequence_id in sequence_ids:
            result = await session.run(ops.admit(sequence_id, PROMPT))
            found = result.results[0].admit.num_cached_tokens
            await execution.start(result.plan)
            positions = range(found, len(PROMPT))
            outputs = []
            for layer in execution.layers:
                tensors = [rows(layer, positions, heads) for heads in (8, 4, 4)]
                output = bytes((await execution.layer(layer, *tensors)).data)
                outputs.append(output[-4 * 8 * 8 * 4 :])
            await session.submit_receipts()
        assert found == num_cached
    return outputs


async def test_shards_load_as_far_as_all_of_them_have_files(tmp_path: Path) -> None:
    files = {"file_tier_dir": tmp_path / "files", "file_tier_bytes": 2**20}
    shards = [{**ranges, **files} for ranges in by_heads(2)]
    async with ShardedPool(tmp_path, shards) as pool:
        async with ControlClient(pool.address, timeout_s=PATIENCE_S) as control:
            await control.wait_ready(POOL, timeout_s=PATIENCE_S)
            expected = await compute(control, [1, 2], 8 * NUM_FULL)
        tiers = [plane.files for plane in pool.planes.values()]
        await until(lambda: all(tier and tier.files.num_files == NUM_FULL for tier in tiers))
    paths = in_order(tmp_path)
    assert len(paths) == 2 * NUM_FULL
    paths[-1].unlink()  # the last block, of one shard
    async with ShardedPool(tmp_path, shards) as pool:
        for plane in pool.planes.values():
            assert plane.files is not None
            await asyncio.to_thread(plane.files.files.scanned.wait)
        async with ControlClient(pool.address, timeout_s=PATIENCE_S) as control:
            await control.wait_ready(POOL, timeout_s=PATIENCE_S)
            async with (
                await control.open_session(POOL, LAYOUT) as session,
                PrefixLoader(control, session, timeout_s=PATIENCE_S) as loader,
            ):
                loaded = await loader.load(PROMPT)
            assert (loaded.num_cached_tokens, loaded.num_loaded_tokens) == (16, 16)
            assert await compute(control, [1], 16) == expected
