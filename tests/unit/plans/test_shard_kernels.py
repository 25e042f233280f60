"""Kernels called on the pools of one shard: where the tokens of blocks go, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_plane.execution.counters import ExecutorCounters
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.memory.pool import Pools
from data_plane.plans.batches.attention_batch import AttentionBatch, prepare_batch
from data_plane.plans.batches.transfers import Batch
from data_plane.plans.tables.block_tables import BlockTables
from data_plane.plans.tables.table_changes import apply_changes
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.shard import Shard
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import (
    BLOCK_SIZE,
    DEVICE,
    HOST,
    LAYOUT,
    dense_attention,
    pack_changes,
    pack_spans,
    set_blocks,
    span,
    tokens,
)
from tests.helpers.refusals import refused

LAYERS = range(2)


class Bench:
    """Sequence 1 has blocks 3, 0 and 5; the pools hold zeros."""

    def __init__(self) -> None:
        kernels, cpu, shard = CpuKernels(1), torch.device("cpu"), Shard.whole(LAYOUT)
        self.counters = ExecutorCounters()
        self.pools = Pools(
            LAYOUT,
            shard,
            num_device_blocks=6,
            num_host_blocks=4,
            device=cpu,
            drain=kernels.streams.drain,
        )
        for tier in (self.pools.device_tier, self.pools.host_tier):
            tier.zero_()
        self.compute = ShardKernels(
            LAYOUT, shard, self.pools, self.counters, device=cpu, kernels=kernels
        )
        self.tables = BlockTables(self.pools.num_blocks, BLOCK_SIZE)
        changes = pack_changes([set_blocks(1, [(3, 1), (0, 1), (5, 1)])])
        apply_changes(self.tables, 1, plan_pb2.Plan(changes=changes))

    def batch(self, first: int, num: int) -> AttentionBatch:
        return prepare_batch(self.tables, 1, pack_spans([span(1, first, num)]))


@given(st.integers(0, 23), st.integers(1, 24), st.integers(-1, 3), st.integers(1, 3), st.data())
def test_blocks_are_written_to_the_slots_of_the_span_and_to_no_other(
    first: int, num: int, first_block: int, num_blocks: int, data: st.DataObject
) -> None:
    bench = Bench()
    num = min(num, 24 - first)
    batch = bench.batch(first, num)
    blocks = torch.rand(2, num_blocks, *bench.pools.device_tier.shape[2:]) + 1
    given_positions = range(first_block * BLOCK_SIZE, (first_block + num_blocks) * BLOCK_SIZE)
    inside = [p for p in range(first, first + num) if p in given_positions]
    if first_block < 0 or not inside:
        with refused(InvalidRequestError, "entries"):
            bench.compute.check_blocks(batch, 0, LAYERS, first_block, blocks)
        return
    held = bench.compute.check_blocks(batch, 0, LAYERS, first_block, blocks)
    assert [first + i for i in held] == inside
    bench.compute.write_span(batch, 0, LAYERS, first_block, blocks, held)
    want = torch.zeros_like(bench.pools.device_tier)
    for p in inside:
        block, i = (3, 0, 5)[p // BLOCK_SIZE], p // BLOCK_SIZE - first_block
        want[block, :, :, :, p % BLOCK_SIZE] = blocks[:, i, :, :, p % BLOCK_SIZE]
    assert torch.equal(bench.pools.device_tier, want)
    assert bench.counters.num_written_tokens == 2 * len(inside)


@pytest.mark.parametrize("shape", [(1, 1, 2, 2, 8, 16), (2, 1, 2, 2, 8, 8), (2, 2, 2, 8, 16)])
def test_blocks_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    bench = Bench()
    with refused(InvalidRequestError, "blocks"):
        bench.compute.check_blocks(bench.batch(0, 8), 0, LAYERS, 0, torch.zeros(shape))


def test_what_is_written_is_read_and_attended() -> None:
    bench = Bench()
    batch = bench.compute.prepare(bench.batch(0, 20))
    key, value, query = tokens(20, seed=1), tokens(20, seed=2), tokens(20, 4, seed=3)
    bench.compute.write(bench.compute.write_arguments(batch, 1, key, value))
    arguments = bench.compute.attention_arguments(batch, 1, query, AttentionOptions())
    output = bench.compute.attend(arguments, 20)
    torch.testing.assert_close(output, dense_attention(query, key, value), atol=1e-5, rtol=1e-5)
    bench.compute.finish()
    blocks = bench.compute.read(DEVICE, np.array([3, 0], np.int32), range(1, 2), np.array([8, 8]))
    assert torch.equal(blocks[0, :, 0].transpose(1, 2).flatten(0, 1), key[:16])
    assert not bench.pools.device_tier[:, 0].any(), "the other layer"
    assert (bench.counters.num_written_tokens, bench.counters.num_attention_tokens) == (20, 20)


def test_tensors_that_do_not_fit_the_plan_are_refused_by_the_callers_name() -> None:
    bench = Bench()
    batch = bench.batch(0, 4)
    good = tokens(4)
    for key, value, field in (
        (good.half(), good.half(), "row.key"),
        (good, good.double(), "row.value"),
        (tokens(5), tokens(5), "row.key"),
    ):
        with refused(InvalidRequestError, field):
            bench.compute.write_arguments(batch, 0, key, value, "row.")
    for query in (tokens(5, 4), tokens(4, 4).half()):
        with refused(InvalidRequestError, "row.query"):
            bench.compute.attention_arguments(batch, 0, query, AttentionOptions(), "row.")


@pytest.mark.parametrize(
    ("source", "destination", "direction"),
    [(DEVICE, DEVICE, "copy"), (DEVICE, HOST, "swap_out"), (HOST, DEVICE, "swap_in")],
)
def test_transfers_are_counted_by_direction(
    source: pb.Tier, destination: pb.Tier, direction: str
) -> None:
    bench = Bench()
    for tier in (DEVICE, HOST):
        of_tier = bench.pools.tier(tier)
        of_tier.copy_(torch.rand(of_tier.shape))
    before = bench.pools.tier(source).clone()
    bench.compute.transfer(Batch(source, destination, torch.tensor([[0, 1], [2, 3]])))
    bench.compute.finish()
    after = bench.pools.tier(destination)
    assert torch.equal(after[1], before[0])
    assert torch.equal(after[3], before[2])
    assert bench.counters.num_transferred_blocks == {direction: 2}
    assert bench.counters.transfer_bytes == {direction: 2 * before[0].nbytes}


def test_only_the_blocks_named_are_cleared() -> None:
    bench = Bench()
    for tier in (DEVICE, HOST):
        bench.pools.tier(tier).fill_(1.0)
    bench.compute.clear({DEVICE: np.array([1, 4]), HOST: np.array([0])})
    for tier, cleared in ((DEVICE, {1, 4}), (HOST, {0})):
        of_tier = bench.pools.tier(tier)
        assert {i for i, block in enumerate(of_tier) if not block.any()} == cleared
        assert all(bool((of_tier[i] == 1).all()) for i in set(range(4)) - cleared)
    assert bench.counters.num_cleared_blocks == 3
