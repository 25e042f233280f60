"""A plan's changes of the block tables, against tables that are lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_author import BLOCK_SIZE, DEVICE, HOST, Change, drop, fork, pack_changes, set_blocks

from data_plane.plans.block_tables import BlockTables
from data_plane.plans.table_changes import Allocated, AllocatedBlocks, apply_changes
from kvplane.errors import (
    BlockInUseError,
    InvalidRequestError,
    KvplaneError,
    SequenceNotFoundError,
    StaleGenerationError,
)
from kvplane.v1 import types_pb2 as pb

NUM_BLOCKS = {DEVICE: 64, HOST: 8}
Model = dict[int, list[tuple[int, int]]]


def apply(
    tables: BlockTables, *changes: Change, session_id: int = 1, resync: bool = False
) -> AllocatedBlocks:
    with tables.transaction():
        plan = pb.Plan(changes=pack_changes(changes), resync=resync)
        return apply_changes(tables, session_id, plan)


def entries(tables: BlockTables, session_id: int = 1) -> Model:
    return {
        sequence_id: list(zip(table.blocks.tolist(), table.generations.tolist(), strict=True))
        for sequence_id, table in tables.of_session(session_id).items()
    }


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["set", "replace", "fork", "drop"]),
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(0, 4),
        st.integers(1, 3),
    ),
    max_size=6,
)


@given(st.lists(CHANGES, max_size=4))
def test_tables_change_as_lists_do(plans: list[list[tuple[str, int, int, int, int]]]) -> None:
    """Each plan makes several changes; what they allocate was never allocated before."""
    tables, model, next_block = BlockTables(NUM_BLOCKS, BLOCK_SIZE), Model(), 0
    for plan in plans:
        changes: list[Change] = []
        for kind, sequence_id, other, first, num in plan:
            table = model.get(sequence_id, [])
            if kind in ("set", "replace") and next_block + num <= NUM_BLOCKS[DEVICE]:
                first = min(first, len(table)) if kind == "set" else 0
                new = [(block, 1) for block in range(next_block, next_block + num)]
                next_block += num
                kept = table if kind == "set" else []
                model[sequence_id] = kept[:first] + new + kept[first + num :]
                replaces = kind == "replace"
                changes.append(set_blocks(sequence_id, new, first_block=first, replace=replaces))
            elif kind == "fork" and other in model and other != sequence_id:
                num = min(num, len(model[other]))
                model[sequence_id] = model[other][:num]
                changes.append(fork(sequence_id, other, num))
            elif kind == "drop" and sequence_id in model:
                del model[sequence_id]
                changes.append(drop(sequence_id))
        apply(tables, *changes)
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


BAD: dict[str, tuple[list[Change], type[KvplaneError], str]] = {
    "an unknown kind": ([Change(9, 1)], InvalidRequestError, "kinds[0]"),
    "a sequence 0": ([set_blocks(0, [(3, 1)])], InvalidRequestError, "sequence_ids[0]"),
    "an unknown tier": (
        [set_blocks(3, [(3, 1)], tier=9)],  # type: ignore[arg-type]
        InvalidRequestError,
        "tiers[0]",
    ),
    "no such block": ([set_blocks(3, [(3, 1), (64, 1)])], InvalidRequestError, "indices[1]"),
    "a negative entry": (
        [set_blocks(3, [(3, 1)], first_block=-1)],
        InvalidRequestError,
        "first_blocks[0]",
    ),
    "a gap in the table": (
        [set_blocks(1, [(3, 1)], first_block=3)],
        InvalidRequestError,
        "first_blocks[0]",
    ),
    "an entry of the other tier": (
        [set_blocks(2, [(3, 1)], first_block=1)],
        InvalidRequestError,
        "tiers[0]",
    ),
    "a fork of nothing": ([fork(3, 9, 1)], SequenceNotFoundError, "parent_sequence_ids[0]"),
    "a fork of itself": ([fork(1, 1, 1)], InvalidRequestError, "parent_sequence_ids[0]"),
    "a fork of too much": ([fork(3, 1, 3)], InvalidRequestError, "num_blocks[0]"),
    "a drop of nothing": ([drop(1), drop(9)], SequenceNotFoundError, "sequence_ids[1]"),
    "an old generation": (
        [set_blocks(1, [(1, 1)], first_block=1, allocated=False), set_blocks(3, [(0, 1)])],
        StaleGenerationError,
        "generations[1]",
    ),
    "a generation to come": (
        [set_blocks(3, [(0, 2)], allocated=False)],
        StaleGenerationError,
        "generations[0]",
    ),
    "a block that was never allocated": (
        [set_blocks(3, [(9, 0)], allocated=False)],
        StaleGenerationError,
        "generations[0]",
    ),
    "a block of its own table": ([set_blocks(3, [(0, 2)])], StaleGenerationError, "generations[0]"),
    "a block of another's table": ([set_blocks(3, [(2, 2)])], BlockInUseError, "generations[0]"),
}


@pytest.mark.parametrize("reason", BAD)
def test_what_does_not_fit_is_refused_by_its_field_and_undone(reason: str) -> None:
    tables = sound()
    changes, error, field = BAD[reason]
    before = entries(tables), entries(tables, 2), tables.generations[DEVICE].tolist()
    with pytest.raises(error) as refused:
        apply(tables, *changes)
    assert refused.value.field == f"plan.changes.{field}"
    assert (entries(tables), entries(tables, 2), tables.generations[DEVICE].tolist()) == before
    tables.check_integrity()


def test_a_plan_of_whole_tables_forgets_the_others_of_its_session() -> None:
    tables = sound()
    apply(tables, set_blocks(9, [(1, 1)], allocated=False), resync=True)
    assert entries(tables) == {9: [(1, 1)]}
    assert entries(tables, 2) == {1: [(2, 1)]}
    tables.check_integrity()


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
    assert of_device.pairs() == {(0, 2), (0, 3), (1, 5)}
    assert of_device.former_pairs() == {(0, 1), (0, 2), (1, 1)}
    assert np.array_equal(tables.generations[DEVICE][:3], [3, 5, 1])
    tables.check_integrity()


def test_an_allocation_forgets_what_was_published() -> None:
    tables = sound()
    tables.publications.published[:3] = True
    apply(tables, drop(1), set_blocks(3, [(0, 2)]))
    assert tables.publications.published[:3].tolist() == [False, True, True]
