"""The columns of table changes and of allocations: read as they were packed, or refused by name."""

from __future__ import annotations

from data_plane.plans.tables.change_columns import ChangeColumns, read_allocations
from kvplane.wire.plane.v1 import plan_pb2
from tests.helpers.data.plan_author import (
    DEVICE,
    HOST,
    drop,
    fork,
    pack_allocations,
    pack_changes,
    ref,
    set_blocks,
    trim,
    truncate,
)

NUM_BLOCKS = {DEVICE: 8, HOST: 4}


def test_entries_belong_to_the_changes_that_set_them() -> None:
    changes = [
        fork(4, 1, 2),
        set_blocks(1, [(7, 2), (5, 1)], allocated=[True, False]),
        trim(1, 1),
        set_blocks(2, [(3, 9)], tier=HOST, replace=True, first_block=6),
        truncate(2, 7),
        drop(3),
    ]
    read = ChangeColumns.read(NUM_BLOCKS, pack_changes(changes))
    assert read.kinds.tolist() == [c.kind for c in changes]
    assert read.sequence_ids.tolist() == [4, 1, 1, 2, 2, 3]
    assert read.first_blocks.tolist() == [0, 0, 0, 6, 0, 0]
    assert read.num_blocks.tolist() == [2, 2, 1, 1, 7, 0]
    assert read.parents.tolist() == [1]
    assert read.entries.tier_keys.tolist() == [DEVICE, DEVICE, HOST]
    assert read.entries.blocks.tolist() == [7, 5, 3]
    assert read.entries.generations.tolist() == [2, 1, 9]
    assert read.allocated.tolist() == [True, False, True]


def test_allocations_are_read_as_packed() -> None:
    read = read_allocations(NUM_BLOCKS, pack_allocations([ref(7, 2), ref(3, 5, HOST)]))
    assert (read.tier_keys.tolist(), read.blocks.tolist()) == ([DEVICE, HOST], [7, 3])
    assert (len(read), read.generations.tolist()) == (2, [2, 5])
    assert len(read_allocations(NUM_BLOCKS, plan_pb2.Allocations())) == 0
