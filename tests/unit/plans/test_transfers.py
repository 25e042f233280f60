"""A plan's transfers: bad columns are named, generations checked, and the order of all is kept."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.plans.batches.transfers import Transfers
from data_plane.plans.tables.allocations import Allocated
from data_plane.plans.tables.block_tables import BlockTables
from kvplane.errors import InvalidRequestError, StaleGenerationError
from kvplane.wire import columns
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import (
    BLOCK_SIZE,
    DEVICE,
    HOST,
    BlockRef,
    pack_transfers,
    ref,
    transfer,
)
from tests.helpers.refusals import refused

NUM_BLOCKS = {DEVICE: 8, HOST: 4}
ENDS = [(tier, block) for tier, num in NUM_BLOCKS.items() for block in range(num)]


@given(st.lists(st.tuples(st.sampled_from(ENDS), st.sampled_from(ENDS)), max_size=12))
def test_batches_are_of_one_direction_and_together_all_transfers_in_order(
    pairs: list[tuple[tuple[pb.Tier, int], tuple[pb.Tier, int]]],
) -> None:
    pairs = [(a, b) for a, b in pairs if a != b and (a[0], b[0]) != (HOST, HOST)]
    message = pack_transfers([transfer(ref(a[1], 1, a[0]), ref(b[1], 1, b[0])) for a, b in pairs])
    read = Transfers.read(NUM_BLOCKS, message)
    batches = read.batches()
    assert len(read) == len(pairs)
    run = [
        ((batch.source, source), (batch.destination, destination))
        for batch in batches
        for source, destination in batch.pairs.tolist()
    ]
    assert run == pairs
    directions = [(batch.source, batch.destination) for batch in batches]
    assert all(a != b for a, b in itertools.pairwise(directions)), "one call each"


def two() -> plan_pb2.Transfers:
    return pack_transfers(
        [transfer(ref(0), ref(1)), transfer(ref(1), ref(0, 1, HOST))],
    )


# A column that is wrong: its bytes, or its second element; and the field that is named.
BAD: dict[str, tuple[str, int | bytes, str]] = {
    "no tier to read": ("source_tiers", 0, "source_tiers[1]"),
    "no tier to write": ("destination_tiers", 9, "destination_tiers[1]"),
    "no block to read": ("source_indices", 8, "source_indices[1]"),
    "no host block": ("destination_indices", 4, "destination_indices[1]"),
    "a negative block": ("destination_indices", -1, "destination_indices[1]"),
    "inside the host": ("source_tiers", HOST, "destination_tiers[1]"),
    "a group that is not there": ("groups", b"\0\1", "groups[1]"),
}


@pytest.mark.parametrize("reason", BAD)
def test_what_is_malformed_is_refused_by_its_field(reason: str) -> None:
    column, value, field = BAD[reason]
    message = two()
    if isinstance(value, int):
        kind = columns.INT32 if column.endswith("indices") else columns.UINT8
        value = columns.pack(kind, [columns.read(kind, getattr(message, column), "")[0], value])
    setattr(message, column, value)
    with refused(InvalidRequestError, f"plan.transfers.{field}"):
        Transfers.read(NUM_BLOCKS, message)


def test_a_block_is_not_copied_to_itself() -> None:
    with refused(InvalidRequestError, "plan.transfers.destination_indices[0]"):
        Transfers.read(NUM_BLOCKS, pack_transfers([transfer(ref(3), ref(3, 2))]))
    across = pack_transfers([transfer(ref(3), ref(3, 1, HOST))])
    assert len(Transfers.read(NUM_BLOCKS, across)) == 1


def after_changes() -> tuple[BlockTables, dict[Any, Allocated]]:
    """Blocks 0 to 3 are of generation 5. The plan allocated block 2 (to 6, then to 7) and host
    block 1 (to 1).
    """
    tables = BlockTables(NUM_BLOCKS, BLOCK_SIZE)
    tables.allocate(DEVICE, np.arange(4), np.full(4, 5))
    new = {
        DEVICE: Allocated(np.array([2, 2]), np.array([6, 7]), np.array([5, 6])),
        HOST: Allocated(np.array([1]), np.array([1]), np.array([0])),
    }
    for tier, of_tier in new.items():
        tables.allocate(tier, of_tier.blocks, of_tier.generations)
    return tables, new


@pytest.mark.parametrize(
    ("source", "destination", "field"),
    [
        (ref(0, 5), ref(2, 7), None),
        (ref(0, 5), ref(2, 6), None),
        (ref(2, 6), ref(1, 1, HOST), None),
        (ref(0, 4), ref(2, 7), "source_generations"),
        (ref(2, 5), ref(1, 1, HOST), None),
        (ref(2, 4), ref(1, 1, HOST), "source_generations"),
        (ref(1, 0, HOST), ref(2, 7), "source_generations"),
        (ref(4, 0), ref(2, 7), "source_generations"),
        (ref(0, 5), ref(1, 5), "destination_generations"),
        (ref(0, 5), ref(2, 5), "destination_generations"),
        (ref(0, 5), ref(0, 1, HOST), "destination_generations"),
    ],
)
def test_a_plan_reads_what_is_present_or_its_own_and_fills_its_own_alone(
    source: BlockRef, destination: BlockRef, field: str | None
) -> None:
    tables, allocated = after_changes()
    good = transfer(ref(3, 5), ref(1, 1, HOST))
    read = Transfers.read(NUM_BLOCKS, pack_transfers([good, transfer(source, destination)]))
    if field is None:
        read.check_generations(tables, allocated)
        return
    with refused(StaleGenerationError, f"plan.transfers.{field}[1]"):
        read.check_generations(tables, allocated)
