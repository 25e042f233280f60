"""A plan's changes of the block tables, against tables that are lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.plans.tables.allocations import Allocated, AllocatedBlocks
from data_plane.plans.tables.block_tables import BlockTables, Table
from data_plane.plans.tables.table_changes import apply_changes
from data_plane.tier_keys import TierKey
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    SequenceNotFoundError,
    StaleGenerationError,
)
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import (
    BLOCK_SIZE,
    DEVICE,
    HOST,
    BlockRef,
    Change,
    drop,
    fork,
    keep,
    pack_allocations,
    pack_changes,
    ref,
    set_blocks,
    trim,
    truncate,
)
from tests.helpers.refusals import refused

NUM_BLOCKS = {DEVICE: 64, HOST: 8}
HUGE = 2**63 - 1
Model = dict[int, list[tuple[int, int]]]


def apply(
    tables: BlockTables,
    *changes: Change,
    session_id: int = 1,
    resync: bool = False,
    allocations: Sequence[BlockRef] = (),
) -> AllocatedBlocks:
    plan = plan_pb2.Plan(
        changes=pack_changes(changes), resync=resync, allocations=pack_allocations(allocations)
    )
    with tables.transaction():
        return apply_changes(tables, session_id, plan)


def entries(tables: BlockTables, session_id: int = 1) -> Model:
    return {
        sequence_id: list(zip(table.blocks.tolist(), table.generations.tolist(), strict=True))
        for sequence_id, table in tables.of_session(session_id).items()
    }


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["set", "replace", "fork", "drop", "truncate", "trim", "keep"]),
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(0, 4),
        st.integers(1, 3),
    ),
    max_size=6,
)
HOLE = (0, 0)


@given(st.lists(st.tuples(st.booleans(), CHANGES), max_size=4), st.sampled_from([DEVICE, HOST]))
def test_tables_change_as_lists_do(
    plans: list[tuple[bool, list[tuple[str, int, int, int, int]]]], tier: pb.Tier
) -> None:
    """Each plan, some with ``resync``, makes several changes; what they allocate was never
    allocated before.
    """
    tables, model, next_block = BlockTables(NUM_BLOCKS, BLOCK_SIZE), Model(), 0
    for resync, plan in plans:
        changes: list[Change] = []
        before = Model()
        if resync:
            before, model = model, Model()
        for kind, sequence_id, other, first, num in plan:
            table = model.get(sequence_id, [])
            if kind in ("set", "replace") and next_block + num <= NUM_BLOCKS[tier]:
                replaces = kind == "replace"
                kept = [HOLE] * first if replaces else table
                first = min(max(first, kept.count(HOLE)), len(kept))
                new = [(block, 1) for block in range(next_block, next_block + num)]
                next_block += num
                model[sequence_id] = kept[:first] + new + kept[first + num :]
                changes.append(
                    set_blocks(sequence_id, new, first_block=first, replace=replaces, tier=tier)
                )
            elif kind == "fork" and other in model and other != sequence_id:
                num = min(num, len(model[other]))
                model[sequence_id] = model[other][:num]
                changes.append(fork(sequence_id, other, num))
            elif kind == "drop" and sequence_id in model:
                del model[sequence_id]
                changes.append(drop(sequence_id))
            elif kind == "truncate" and sequence_id in model:
                num = min(first, len(table))
                model[sequence_id] = table[:num]
                changes.append(truncate(sequence_id, num))
            elif kind == "trim" and sequence_id in model:
                num = min(num, len(table))
                model[sequence_id] = [HOLE] * num + table[num:]
                changes.append(trim(sequence_id, num))
            elif kind == "keep" and sequence_id in before:
                kept = before.pop(sequence_id)
                num = min(first, len(kept))
                model[sequence_id] = kept[:num]
                changes.append(keep(sequence_id, num))
        apply(tables, *changes, resync=resync)
        assert entries(tables) == model
        tables.check_integrity()


def sound() -> BlockTables:
    """Session 1's sequence 1 has blocks 0 and 1, and sequence 2 host block 0; session 2's sequence
    1 has block 2.
    """
    tables = BlockTables(NUM_BLOCKS, BLOCK_SIZE)
    apply(tables, set_blocks(1, [(0, 1), (1, 1)]), set_blocks(2, [(0, 1)], tier=HOST))
    apply(tables, set_blocks(1, [(2, 1)]), session_id=2)
    return tables


Bad = dict[str, tuple[list[Change], str]]
"""Changes that are refused, and the field that is named."""
INVALID: Bad = {
    "an unknown kind": ([Change(9, 1)], "kinds[0]"),
    "no kind": ([Change(0, 1)], "kinds[0]"),
    "a sequence 0": ([set_blocks(0, [(3, 1)])], "sequence_ids[0]"),
    "an unknown tier": ([replace(set_blocks(3, [(3, 1)]), tier=9)], "tiers[0]"),
    "no such block": ([set_blocks(3, [(3, 1), (64, 1)])], "indices[1]"),
    "a negative block": ([set_blocks(3, [(-1, 1)])], "indices[0]"),
    "no such host block": ([set_blocks(3, [(8, 1)], tier=HOST)], "indices[0]"),
    "more blocks than the pool": ([set_blocks(3, [(0, 1)] * 65, allocated=False)], "num_blocks[0]"),
    "a negative number of blocks": (
        [set_blocks(3, [(3, 1)]), replace(set_blocks(4, [], tier=HOST), num_blocks=-1)],
        "num_blocks[1]",
    ),
    "a drop with a tier": ([replace(drop(1), tier=HOST)], "tiers[0]"),
    "a negative entry": ([set_blocks(3, [(3, 1)], first_block=-1)], "first_blocks[0]"),
    "a gap in the table": ([set_blocks(1, [(3, 1)], first_block=3)], "first_blocks[0]"),
    "an entry of the other tier": ([set_blocks(2, [(3, 1)], first_block=1)], "tiers[0]"),
    "a fork of itself": ([fork(1, 1, 1)], "parent_sequence_ids[0]"),
    "a fork of too much": ([fork(3, 1, 3)], "num_blocks[0]"),
    "more kept than there is": ([truncate(1, 3)], "num_blocks[0]"),
    "a negative truncation": ([truncate(1, -1)], "num_blocks[0]"),
    "a truncation with a tier": ([replace(truncate(1, 0), tier=DEVICE)], "tiers[0]"),
    "more trimmed than there is": ([trim(1, 2), trim(1, 3)], "num_blocks[1]"),
    "a trim from somewhere": ([replace(trim(1, 0), first_block=1)], "first_blocks[0]"),
    "an entry that was trimmed": ([trim(1, 1), set_blocks(1, [(3, 1)])], "first_blocks[1]"),
    "kept of a plan that goes on": ([drop(2), keep(1, 1)], "kinds[1]"),
    "kept with a tier": ([replace(keep(1, 0), tier=DEVICE)], "tiers[0]"),
    "a table longer than any": (
        [set_blocks(3, [(3, 1)], first_block=2**22, replace=True)],
        "num_blocks[0]",
    ),
}
MISSING: Bad = {
    "a fork of nothing": ([fork(3, 9, 1)], "parent_sequence_ids[0]"),
    "a drop of nothing": ([drop(1), drop(9)], "sequence_ids[1]"),
    "a truncation of nothing": ([truncate(9, 0)], "sequence_ids[0]"),
    "a trim of nothing": ([trim(9, 0)], "sequence_ids[0]"),
}
STALE: Bad = {
    "an old generation": (
        [set_blocks(1, [(1, 1)], first_block=1, allocated=False), set_blocks(3, [(0, 1)])],
        "generations[1]",
    ),
    "a generation to come": ([set_blocks(3, [(0, 2)], allocated=False)], "generations[0]"),
    "a block never allocated": ([set_blocks(3, [(9, 0)], allocated=False)], "generations[0]"),
    "generation 0 of a block that the plan allocates": (
        [set_blocks(3, [(9, 0)], allocated=False), drop(3), set_blocks(4, [(9, 1)])],
        "generations[0]",
    ),
    "the largest generation": ([set_blocks(3, [(9, HUGE)])], "generations[0]"),
    "a block allocated twice of one generation": (
        [set_blocks(3, [(9, 1)]), set_blocks(3, [(9, 1)], replace=True)],
        "generations[1]",
    ),
    "a former generation in a table that stays": (
        [set_blocks(3, [(9, 1)]), set_blocks(4, [(9, 2)])],
        "generations[1]",
    ),
    "a block of its own table": ([set_blocks(3, [(0, 2)])], "generations[0]"),
}
OF_WHOLE_TABLES: dict[type[KvplaneError], Bad] = {
    InvalidRequestError: {
        "more than all": ([keep(1, 3)], "num_blocks[0]"),
        "less than none": ([keep(1, -1)], "num_blocks[0]"),
    },
    SequenceNotFoundError: {
        "kept of nothing": ([keep(2, 1), keep(9, 1)], "sequence_ids[1]"),
        "kept twice": ([keep(1, 2), keep(1, 2)], "sequence_ids[1]"),
    },
    StaleGenerationError: {
        "a kept block": ([keep(1, 2), set_blocks(3, [(0, 2)])], "generations[0]")
    },
}


def cases() -> Iterator[Any]:
    """Yield changes, whether they are of whole tables, the error and the field that it names."""
    errors = (InvalidRequestError, SequenceNotFoundError, StaleGenerationError)
    for error, bad in zip(errors, (INVALID, MISSING, STALE), strict=True):
        for is_whole, of_kind in ((False, bad), (True, OF_WHOLE_TABLES[error])):
            for reason, (changes, field) in of_kind.items():
                yield pytest.param(changes, is_whole, error, field, id=reason)


@pytest.mark.parametrize(("changes", "is_whole", "error", "field"), [*cases()])
def test_what_does_not_fit_is_refused_by_its_field_and_undone(
    changes: list[Change], is_whole: bool, error: type[KvplaneError], field: str
) -> None:
    tables = sound()
    before = entries(tables), entries(tables, 2), tables.generations[DEVICE].tolist()
    with refused(error, f"plan.changes.{field}"):
        apply(tables, *changes, resync=is_whole)
    assert (entries(tables), entries(tables, 2), tables.generations[DEVICE].tolist()) == before
    tables.check_integrity()


def test_a_plan_of_whole_tables_forgets_the_others_of_its_session() -> None:
    tables = sound()
    apply(tables, set_blocks(9, [(1, 1)], allocated=False), resync=True)
    assert entries(tables) == {9: [(1, 1)]}
    assert entries(tables, 2) == {1: [(2, 1)]}
    tables.check_integrity()


class Counting(BlockTables):
    """Counts the entries whose references are added or taken away."""

    num_counted = 0

    def add_references(self, tier_key: TierKey, tables: Mapping[Table, int]) -> None:
        self.num_counted += sum(len(table.blocks) for table, weight in tables.items() if weight)
        super().add_references(tier_key, tables)


def test_of_long_tables_that_are_kept_only_what_is_lost_is_counted() -> None:
    num, length = 64, 1000
    tables = Counting({DEVICE: num * length, HOST: 8}, BLOCK_SIZE)
    for i in range(num):
        apply(tables, set_blocks(i + 1, [(i * length + k, 1) for k in range(length)]))
    plan = plan_pb2.Plan(changes=pack_changes([keep(i + 1, length - i % 2) for i in range(num)]))
    plan.resync = True
    tables.num_counted = 0
    with tables.transaction():
        apply_changes(tables, 1, plan)
    tables.check_integrity()
    assert tables.num_counted == num // 2


def test_what_a_plan_allocates_is_told_with_the_generations_that_end() -> None:
    tables = sound()
    allocated = apply(
        tables,
        drop(1),
        set_blocks(3, [(0, 2), (1, 5)]),
        drop(3),
        set_blocks(4, [(0, 3)]),
        set_blocks(5, [(1, 1)], tier=HOST),
    )
    assert set(allocated) == {DEVICE, HOST}
    of_device: Allocated = allocated[DEVICE]
    assert of_device.blocks.tolist() == [0, 0, 1]
    assert of_device.generations.tolist() == [2, 3, 5]
    assert of_device.former_generations.tolist() == [1, 2, 1]
    assert np.array_equal(tables.generations[DEVICE][:3], [3, 5, 1])
    tables.check_integrity()


def test_generations_that_begin_and_end_are_found_also_of_blocks_allocated_twice() -> None:
    new = Allocated(np.array([2, 5, 5, 7]), np.array([9, 3, 4, 1]), np.array([8, 2, 3, 0]))
    blocks = np.array([5, 5, 5, 2, 2, 6, 9, 0, 7])
    generations = np.array([2, 3, 4, 9, 8, 1, 1, 1, 0])
    assert np.flatnonzero(new.begins(blocks, generations)).tolist() == [1, 2, 3]
    assert np.flatnonzero(new.ends(blocks, generations)).tolist() == [0, 1, 4, 8]
    assert new.before(blocks).tolist() == [2, 2, 2, 8, 8, -1, -1, -1, 0]


def test_blocks_for_no_table_are_allocated_after_those_of_tables() -> None:
    tables = sound()
    tables.publications[0].published[:4] = True
    allocated = apply(
        tables,
        set_blocks(3, [(5, 1)]),
        drop(3),
        drop(1),
        allocations=[ref(5, 2), ref(3), ref(0, 2), ref(3, 1, HOST)],
    )
    assert allocated[DEVICE].generations.tolist() == [2, 1, 1, 2]
    assert tables.generations[DEVICE][:6].tolist() == [2, 1, 1, 1, 0, 2]
    assert tables.generations[HOST][3] == 1
    assert tables.ref_counts[DEVICE].tolist()[:6] == [0, 0, 1, 0, 0, 0]
    assert tables.publications[0].published[:4].tolist() == [False, True, True, False]
    tables.check_integrity()


BAD_ALLOCATIONS: dict[str, tuple[list[BlockRef], type[KvplaneError], str]] = {
    "no tier": ([ref(3), ref(3, 1, pb.TIER_UNSPECIFIED)], InvalidRequestError, "tiers[1]"),
    "no such block": ([ref(3), ref(8, 1, HOST)], InvalidRequestError, "indices[1]"),
    "a generation that is there": ([ref(3), ref(2, 1)], StaleGenerationError, "generations[1]"),
    "a generation twice": ([ref(3), ref(3)], StaleGenerationError, "generations[1]"),
    "a block of its own table": ([ref(3), ref(1, 2)], StaleGenerationError, "generations[1]"),
}


@pytest.mark.parametrize("reason", BAD_ALLOCATIONS)
def test_an_allocation_for_no_table_that_does_not_fit_is_refused(reason: str) -> None:
    tables = sound()
    allocations, error, field = BAD_ALLOCATIONS[reason]
    before = tables.generations[DEVICE].tolist()
    with refused(error, f"plan.allocations.{field}"):
        apply(tables, set_blocks(3, [(9, 1)]), allocations=allocations)
    assert tables.generations[DEVICE].tolist() == before
    tables.check_integrity()


def test_a_block_may_be_taken_from_another_sessions_table() -> None:
    tables = sound()
    apply(tables, set_blocks(3, [(2, 2)]))
    apply(tables, set_blocks(7, [(2, 2)], allocated=False), session_id=3)
    tables.check_integrity()
    assert (tables.ref_counts[DEVICE][2], tables.stale_counts[DEVICE][2]) == (2, 1)
    for change in (fork(5, 1, 1), truncate(5, 0), set_blocks(5, [(3, 1)]), drop(5), drop(1)):
        apply(tables, change, session_id=2)
        tables.check_integrity()
    assert tables.stale_counts[DEVICE][2] == 0


def test_many_forks_in_a_plan_of_whole_tables_cost_what_one_does() -> None:
    num_forks, num_blocks = 2000, 480
    tables = Counting({DEVICE: 1000, HOST: 8}, BLOCK_SIZE)
    forks = [fork(i, 1 if i < 4 else i - 2, num_blocks - i % 2) for i in range(2, num_forks)]
    for generation in (1, 2):
        new = [(block, generation) for block in range(num_blocks)]
        plan = plan_pb2.Plan(changes=pack_changes([set_blocks(1, new), *forks]), resync=True)
        tables.num_counted = 0
        with tables.transaction():
            apply_changes(tables, 1, plan)
    tables.check_integrity()
    own = {id(table) for table in tables.of_session(1).values()}
    assert len(own) == 2, "all forks of a length are one table"
    assert tables.num_counted <= 5 * num_blocks, "of a million entries in all"
