"""Sequences that share blocks: what they share is read once, and no bit depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import shared_reads
import torch
from kernel_cases import FLOATS, FP8, Batch, Case, assert_same_bits, build

from data_plane.kernels.backends.cpu import CpuKernels

BF16 = torch.bfloat16
LENS = ((1, 1100), (3, 1090), (1, 700), (1, 1024), (2, 1500), (1, 100))
DTYPES = [(dtype, dtype) for dtype in FLOATS] + [(BF16, dtype) for dtype in FP8]


def sharing(case: Case, num_shared_blocks: int) -> Batch:
    """The case's batch, with the first sequence's first blocks in all block tables. Blocks that no
    sequence has any more hold NaN.
    """
    batch = build(case)
    tables = batch.block_tables.clone()
    used = -(-batch.context_lens // case.block_size)
    for s in range(1, len(tables)):
        num = min(num_shared_blocks, int(used[s]))
        tables[s, :num] = tables[0, :num]
    left = torch.ones(len(batch.pages), dtype=torch.bool)
    left[tables[tables >= 0].long()] = False
    batch.pages.view(torch.uint8)[left] = 0xFF  # a NaN of every type
    return replace(batch, block_tables=tables)


def test_tiles_that_sequences_share_are_read_once(tmp_path: Path) -> None:
    status, printed = shared_reads.run(tmp_path)
    assert status == 0, printed


@pytest.mark.parametrize(("dtype", "pages_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "head_size"), (((8, 2), 64), ((16, 1), 128), ((2, 2), 64)), ids=str
)
def test_sharing_threads_and_the_batch_change_no_bit(
    every_cpu_isa: str,
    dtype: torch.dtype,
    pages_dtype: torch.dtype,
    heads: tuple[int, int],
    head_size: int,
) -> None:
    case = Case(lens=LENS, heads=heads, head_size=head_size, dtype=dtype, pages_dtype=pages_dtype)
    batch = sharing(case, 68)
    apart = CpuKernels(1, share_reads=False).paged_attention(batch.to_attend())
    out, lse = batch.attend(num_threads=1)
    assert not out.isnan().any()
    assert_same_bits(out, apart)
    for num_threads in (2, 5):
        other, other_lse = batch.attend(num_threads=num_threads)
        assert_same_bits(other, out)
        assert_same_bits(other_lse, lse)
    starts = batch.query_starts.tolist()
    for order in ([4], [5, 2, 0], [1, 3, 4, 0]):
        part, part_lse = batch.only(order).attend(num_threads=2)
        rows = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in order])
        assert_same_bits(part, out[rows])
        assert_same_bits(part_lse, lse[rows])


@pytest.mark.parametrize(("window", "alibi"), ((0, True), (600, False), (520, True)))
def test_windows_and_alibi_change_no_bit(every_cpu_isa: str, window: int, alibi: bool) -> None:
    case = Case(lens=LENS, dtype=BF16, window=window, alibi=alibi, sinks=True, soft_cap=9.0)
    batch = sharing(case, 64)
    apart = CpuKernels(1, share_reads=False).paged_attention(batch.to_attend())
    for num_threads in (1, 2, 5):
        assert_same_bits(batch.attend(num_threads=num_threads)[0], apart)


def test_shared_blocks_give_what_float64_gives() -> None:
    batch = sharing(Case(lens=LENS, heads=(8, 2)), 64)
    out, lse = batch.attend(num_threads=2)
    exact, exact_lse = oracle.paged_attention(
        batch.query,
        batch.pages,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        scale=batch.scale,
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=5e-6)


def test_a_prefix_and_the_rest_merge_into_the_whole() -> None:
    batch = sharing(Case(lens=((1, 1100), (1, 1300), (1, 1030)), heads=(8, 2)), 64)
    whole, whole_lse = batch.attend()
    prefix = replace(batch, context_lens=torch.full((3,), 1024))
    rest = replace(
        batch, block_tables=batch.block_tables[:, 64:], context_lens=batch.context_lens - 1024
    )
    out, lse = oracle.merged(prefix.attend(num_threads=2), rest.attend())
    torch.testing.assert_close(out, whole.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse.double(), rtol=1e-6, atol=1e-6)
