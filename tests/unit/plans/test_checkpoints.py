"""Which checkpoints of states a plan keeps: those of its spans' tables, in what is computed."""

from __future__ import annotations

import numpy as np
import pytest

from data_plane.plans.batches.attention_batch import prepare_batch
from data_plane.plans.batches.checkpoints import Checkpoints, prepare_checkpoints
from data_plane.plans.tables.block_tables import BlockTables, Table
from data_plane.tier_keys import tier_key_of
from kvplane.errors import InvalidRequestError
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import BLOCK_SIZE, Span, pack_spans, span
from tests.helpers.refusals import refused

KEYS = {
    (group, tier): tier_key_of(group, tier)
    for group in (0, 1)
    for tier in (pb.TIER_DEVICE, pb.TIER_HOST)
}


def table_of(group: int, blocks: list[int | None], tier: pb.Tier = pb.TIER_DEVICE) -> Table:
    """A table of blocks of generation 1; None where there is none."""
    ids = np.array([block or 0 for block in blocks], np.int32)
    generations = np.array([block is not None for block in blocks], np.int64)
    return Table(KEYS[group, tier], ids, generations, has_holes=group == 1)


def kept(states: dict[int, list[int | None]], *spans: Span, num_layers: int = 2) -> Checkpoints:
    """The checkpoints of a plan of these spans, whose sequences have these tables of states."""
    tables = BlockTables(dict.fromkeys(KEYS.values(), 16), BLOCK_SIZE, 1)
    for key in KEYS.values():
        tables.allocate(key, np.arange(16), np.ones(16))
    for i, each in enumerate(spans):
        tables.put(1, each.sequence_id, table_of(0, [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]))
    for sequence_id, blocks in states.items():
        tables.put(1, sequence_id, table_of(1, blocks), 1)
    batch = prepare_batch(tables, 1, pack_spans(list(spans)))
    found = prepare_checkpoints(tables, 1, batch, num_layers)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("first", "num", "entries"),
    [
        (0, 4 * BLOCK_SIZE, [1, 3]),
        (0, 2 * BLOCK_SIZE, [1]),
        (0, 2 * BLOCK_SIZE - 1, []),
        (2 * BLOCK_SIZE - 1, 1, [1]),
        (2 * BLOCK_SIZE, 2 * BLOCK_SIZE - 1, []),
        (2 * BLOCK_SIZE, 2 * BLOCK_SIZE, [3]),
        (4 * BLOCK_SIZE - 1, 1, [3]),
    ],
)
def test_those_are_kept_that_lie_in_the_span(first: int, num: int, entries: list[int]) -> None:
    found = kept({1: [None, 5, None, 7]}, span(1, first, num))
    assert found.entries.tolist() == entries
    assert found.written_blocks.tolist() == [{1: 5, 3: 7}[entry] for entry in entries]
    assert found.progress.is_complete == (not entries)


def test_each_is_found_by_its_sequence_and_entry() -> None:
    found = kept({1: [3], 3: [None, 9]}, *(span(i, 0, 2 * BLOCK_SIZE) for i in (1, 2, 3)))
    assert [found.find(1, 0, 0), found.find(3, 1, 0)] == [0, 1]
    for sequence_id, entry in ((1, 1), (2, 0), (3, 0)):
        with refused(InvalidRequestError, "entries[4]"):
            found.find(sequence_id, entry, 4)
    found.progress.extend([0, 1], 0, 1)
    found.progress.extend([0], 1, 1)
    assert not found.progress.is_complete
    found.progress.extend([1], 1, 1)
    assert found.progress.is_complete


def test_a_pool_without_states_keeps_none() -> None:
    tables = BlockTables({pb.TIER_DEVICE: 4, pb.TIER_HOST: 0}, BLOCK_SIZE)
    batch = prepare_batch(tables, 1, pack_spans([]))
    assert prepare_checkpoints(tables, 1, batch, 0) is None
