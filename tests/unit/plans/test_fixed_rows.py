"""A batch in buffers that are larger than it, and stay where they are."""

from __future__ import annotations

import pytest
import torch

from data_plane.kernels.step_rows import StepRows
from data_plane.plans.batches.attention_batch import AttentionBatch, prepare_batch
from data_plane.plans.batches.fixed_rows import FixedRows, StepBounds
from data_plane.plans.tables.block_tables import BlockTables
from data_plane.plans.tables.table_changes import apply_changes
from kvplane.errors import InvalidRequestError
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import BLOCK_SIZE, pack_changes, pack_spans, set_blocks, span
from tests.helpers.refusals import refused

BOUNDS = StepBounds(num_tokens=6, context_tokens=28, num_sequences=3, query_tokens=2)
CPU = torch.device("cpu")


def batch_of(*spans: tuple[int, int, int]) -> AttentionBatch:
    """Sequence 1 has blocks 3, 0 and 5, sequence 2 block 7."""
    tables = BlockTables({pb.TIER_DEVICE: 8, pb.TIER_HOST: 0}, BLOCK_SIZE)
    changes = [set_blocks(1, [(3, 1), (0, 1), (5, 1)]), set_blocks(2, [(7, 1)])]
    apply_changes(tables, 1, plan_pb2.Plan(changes=pack_changes(changes)))
    return prepare_batch(tables, 1, pack_spans([span(*s) for s in spans]))


def addresses(rows: StepRows) -> list[int]:
    tensors = rows.slots, rows.block_tables, rows.query_starts, rows.context_lens
    return [tensor.data_ptr() for tensor in tensors]


def test_a_batch_is_followed_by_rows_that_are_of_no_sequence() -> None:
    fixed = FixedRows(BOUNDS, BLOCK_SIZE, CPU)
    rows = fixed.padded(6)
    before = addresses(rows)
    assert rows.is_padded and rows.lengths is None and rows.max_tokens == 2
    fixed.load(batch_of((1, 20, 2), (2, 4, 1)))
    assert rows.slots.tolist() == [44, 45, 60, -1, -1, -1]
    assert rows.query_starts.tolist() == [0, 2, 3, 3]
    assert rows.context_lens.tolist() == [22, 5, 0]
    assert rows.block_tables.shape == (3, 4)
    assert rows.block_tables[0, :3].tolist() == [3, 0, 5] and rows.block_tables[1, 0] == 7
    fixed.load(batch_of((2, 5, 1)))
    assert rows.slots.tolist() == [61, -1, -1, -1, -1, -1]
    assert rows.query_starts.tolist() == [0, 1, 1, 1]
    assert addresses(rows) == before == addresses(fixed.padded(6))
    fixed.clear()
    assert rows.slots.tolist() == [-1] * 6 and not rows.query_starts.any()


def test_a_smaller_step_reads_the_same_memory() -> None:
    fixed = FixedRows(BOUNDS, BLOCK_SIZE, CPU)
    fixed.load(batch_of((1, 20, 1), (2, 4, 1)))
    rows = fixed.padded(2)
    assert rows.slots.tolist() == [44, 45 + 15] and rows.query_starts.tolist() == [0, 1, 2]
    assert rows.context_lens.tolist() == [21, 5] and rows.block_tables.shape == (2, 4)
    assert addresses(rows) == addresses(fixed.padded(6))
    lengths = fixed.lengths(2)
    assert lengths.query_starts.tolist() == [0, 1, 2] and lengths.context_lens.tolist() == [21, 5]
    for num_tokens in (0, 7):
        with pytest.raises(InvalidRequestError):
            fixed.padded(num_tokens)


@pytest.mark.parametrize(
    ("bounds", "name"),
    [
        (StepBounds(2, 28, query_tokens=2), "num_tokens"),
        (StepBounds(6, 28, 1, 2), "num_sequences"),
        (StepBounds(6, 28, 3, 1), "query_tokens"),
        (StepBounds(6, 21, 3, 2), "context_tokens"),
    ],
)
def test_a_batch_that_is_too_large_is_refused_by_name(bounds: StepBounds, name: str) -> None:
    batch = batch_of((1, 20, 2), (2, 4, 1))
    FixedRows(BOUNDS, BLOCK_SIZE, CPU).check_fits(batch)
    with refused(InvalidRequestError, f"bounds.{name}"):
        FixedRows(bounds, BLOCK_SIZE, CPU).check_fits(batch)


def test_rows_made_in_torchs_inference_mode_are_filled_outside_of_it() -> None:
    with torch.inference_mode():
        fixed = FixedRows(BOUNDS, BLOCK_SIZE, CPU)
    fixed.load(batch_of((2, 5, 1)))
    with torch.inference_mode():
        fixed.clear()
    assert fixed.padded(1).slots.tolist() == [-1]


def test_without_a_number_of_sequences_there_are_as_many_as_tokens() -> None:
    assert StepBounds(4, 100).num_sequences == 4
