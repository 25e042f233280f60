"""A plan's spans as the kernels take them, against the tables read token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.plans.batches.attention_batch import prepare_batch
from data_plane.plans.tables.block_tables import BlockTables, Table
from data_plane.plans.write_checks import check_unpublished, check_writable
from kvplane.errors import (
    BlockNotWritableError,
    InvalidRequestError,
    SequenceNotFoundError,
    SequenceSwappedError,
)
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import BLOCK_SIZE, DEVICE, HOST, Span, pack_spans, span
from tests.helpers.refusals import refused

NUM_BLOCKS = 16
HUGE = 2**31 - 1


def tables_of(lists: dict[int, list[int]], tier: pb.Tier = DEVICE) -> BlockTables:
    """Session 1's tables, of blocks of generation 1."""
    tables = BlockTables({DEVICE: NUM_BLOCKS, HOST: NUM_BLOCKS}, BLOCK_SIZE)
    tables.allocate(tier, np.arange(NUM_BLOCKS), np.ones(NUM_BLOCKS))
    for sequence_id, blocks in lists.items():
        put(tables, sequence_id, blocks, tier)
    return tables


def put(tables: BlockTables, sequence_id: int, blocks: list[int], tier: pb.Tier = DEVICE) -> None:
    table = Table(tier, np.array(blocks, np.int32), np.ones(len(blocks), np.int64))
    tables.put(1, sequence_id, table)
    tables.add_references(tier, {table: 1})


@given(st.data())
def test_each_token_is_written_where_its_table_says(data: st.DataObject) -> None:
    free = data.draw(st.permutations(range(NUM_BLOCKS)))
    lists: dict[int, list[int]] = {}
    spans = []
    for sequence_id in (3, 1, 2):
        num_blocks = data.draw(st.integers(1, 4))
        lists[sequence_id], free = list(free[:num_blocks]), free[num_blocks:]
        first = data.draw(st.integers(0, num_blocks * BLOCK_SIZE - 1))
        num = data.draw(st.integers(1, num_blocks * BLOCK_SIZE - first))
        spans.append(span(sequence_id, first, num))
    batch = prepare_batch(tables_of(lists), 1, pack_spans(spans))
    places = [
        (i, lists[s.sequence_id][position // BLOCK_SIZE], position % BLOCK_SIZE)
        for i, s in enumerate(spans)
        for position in range(s.first_position, s.first_position + s.num_tokens)
    ]
    assert batch.slots.tolist() == [block * BLOCK_SIZE + offset for _, block, offset in places]
    ends = [s.first_position + s.num_tokens for s in spans]
    assert batch.context_lens.tolist() == ends
    assert batch.query_starts.diff().tolist() == [s.num_tokens for s in spans]
    assert (batch.num_tokens, batch.max_tokens) == (len(places), max(s.num_tokens for s in spans))
    for s, table, end in zip(spans, batch.block_tables.tolist(), ends, strict=True):
        wanted = lists[s.sequence_id][: -(-end // BLOCK_SIZE)]
        assert table == wanted + [0] * (len(table) - len(wanted))
    written = zip(batch.written_by.tolist(), batch.written_blocks.tolist(), strict=True)
    assert list(written) == list(dict.fromkeys((i, block) for i, block, _ in places))


def test_a_sequence_is_found_by_its_span() -> None:
    spans = pack_spans([span(1, 0, 1), span(2, 0, 1)])
    batch = prepare_batch(tables_of({1: [0], 2: [1]}), 1, spans)
    assert (batch.span_of(1), batch.span_of(2)) == (0, 1)
    with refused(InvalidRequestError, "sequence_id"):
        batch.span_of(3)


BAD: dict[str, tuple[list[Span], str]] = {
    "one in two spans": ([span(1, 0, 1), span(1, 1, 1)], "sequence_ids[1]"),
    "a negative position": ([span(1, -1, 1)], "first_positions[0]"),
    "no slot for the first": ([span(1, 16, 1)], "first_positions[0]"),
    "no slot for the last": ([span(1, 9, 8)], "num_tokens[0]"),
    "no slot at all": ([span(3, 0, 1)], "first_positions[0]"),
    "a huge position": ([span(1, HUGE, 1)], "first_positions[0]"),
    "a huge number": ([span(1, 0, HUGE)], "num_tokens[0]"),
    "no tokens": ([span(1, 0, 0)], "num_tokens[0]"),
    "negative tokens": ([span(1, 0, -1)], "num_tokens[0]"),
    "an unknown sequence": ([span(1, 0, 1), span(9, 0, 1)], "sequence_ids[1]"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_span_that_the_tables_do_not_have_is_refused_by_its_field(reason: str) -> None:
    spans, field = BAD[reason]
    error = SequenceNotFoundError if "unknown" in reason else InvalidRequestError
    with refused(error, f"plan.spans.{field}"):
        prepare_batch(tables_of({1: [0, 1], 2: [2], 3: []}), 1, pack_spans(spans))


def test_a_sequence_on_the_host_is_refused() -> None:
    with refused(SequenceSwappedError, "plan.spans.sequence_ids[0]"):
        prepare_batch(tables_of({1: [0]}, HOST), 1, pack_spans([span(1, 0, 1)]))


def test_tables_of_the_plan_may_share_a_written_block_whatever_is_on_the_host() -> None:
    """A block of the host tier may have the same index, and a stale entry is of another block."""
    tables = tables_of({2: [0], 3: [0]})
    tables.allocate(HOST, np.array([0]), np.array([1]))
    put(tables, 4, [0], HOST)
    tables.put(1, 5, Table(DEVICE, np.array([0], np.int32), np.zeros(1, np.int64)))
    batch = prepare_batch(tables, 1, pack_spans([span(2, 0, 1)]))
    check_writable(tables, 1, batch, np.array([2, 3, 4, 5], np.int64))
    put(tables, 6, [0])
    with pytest.raises(BlockNotWritableError, match="block 0 is shared"):
        check_writable(tables, 1, batch, np.array([2, 3, 4, 5], np.int64))


def test_only_the_blocks_that_are_written_must_be_writable() -> None:
    tables = tables_of({1: [0, 1], 2: [2, 3]})
    put(tables, 5, [2])
    tables.publications[0].published[0] = True
    spans = pack_spans([span(1, BLOCK_SIZE, 1), span(2, BLOCK_SIZE, 1)])
    batch = prepare_batch(tables, 1, spans)
    tables.publications[0].published[3] = True
    with refused(BlockNotWritableError, "plan.spans.sequence_ids[1]", match="block 3 is published"):
        check_unpublished(tables, batch)
    with pytest.raises(BlockNotWritableError, match="block 2 is shared"):
        batch = prepare_batch(tables, 1, pack_spans([span(2, BLOCK_SIZE - 1, 1)]))
        check_writable(tables, 1, batch, np.array([], np.int64))
