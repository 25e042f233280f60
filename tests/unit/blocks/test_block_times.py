"""How long blocks live, wait and are evicted, by the clock of the pool."""

from __future__ import annotations

import itertools

from control_plane.pools.statistics import (
    DURATION_BOUNDS_S,
    BlockTimes,
    read_block_times,
)
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.native.index_writer import Writer, blocks, checked_pool
from tests.helpers.native.native_pool import DEVICE, OneGroup, i32


def times(pool: OneGroup, tier: tpb.Tier = tpb.TIER_DEVICE) -> BlockTimes:
    return read_block_times(pool.block_times())[tier]


def range_of(duration_s: float) -> int:
    return sum(bound < duration_s for bound in DURATION_BOUNDS_S)


def test_an_evicted_block_tells_its_life_and_how_long_nobody_found_it() -> None:
    with checked_pool(4) as pool:
        writer = Writer(pool)
        pool.set_time(100)
        writer.cache(blocks(1))
        pool.set_time(107)
        writer.cache(blocks(1, 2))  # finds the first block
        pool.set_time(140)
        writer.cache(blocks(*range(10, 14)))  # evicts both
        told = times(pool)
        assert told.num_evictions == {"policy": 2, "retained": 0, "own": 0}
        assert told.reuse_gap.counts[range_of(7)] == 1 == sum(told.reuse_gap.counts)
        assert told.lifetime.sum == (140 - 100) + (140 - 107)
        assert told.lifetime.counts[range_of(40)] == told.lifetime.counts[range_of(33)] == 2
        assert told.idle.sum == 2 * (140 - 107)
        assert told.reuse_gap.sum == 7


def test_retained_blocks_are_evicted_for_that_reason() -> None:
    with checked_pool(2) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1, 2))
        pool.retain(writer.root, writer.owner, i32(blocks(1, 2)), 50, 1e9, 10)
        writer.cache(blocks(3, 4))
        assert times(pool).num_evictions["retained"] == 2


def test_sequences_are_counted_by_tier_and_retired_blocks_age_until_their_receipt() -> None:
    with checked_pool(8) as pool:
        writer = Writer(pool)
        pool.set_time(5)
        sequence_id = writer.write(blocks(1, 2))
        assert (pool.num_sequences_in(DEVICE), pool.num_sequences_in(2)) == (1, 0)
        assert pool.oldest_release_s() == 0
        writer.late = True
        writer.append(sequence_id, len(blocks(1, 2)), [1])
        writer.free(sequence_id)
        pool.set_time(9)
        assert pool.oldest_release_s() == 4
        writer.catch_up()
        assert pool.oldest_release_s() == 0


def test_the_bounds_ascend() -> None:
    assert all(a < b for a, b in itertools.pairwise(DURATION_BOUNDS_S))
