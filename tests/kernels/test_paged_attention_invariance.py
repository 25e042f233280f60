"""The same pages and queries give the same bits, whatever else is in the batch or runs it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import FLOATS, Batch, Case, assert_same_bits, build

from data_plane.kernels.backends.cpu import CpuKernels

pytestmark = pytest.mark.usefixtures("every_cpu_isa")

LENS = ((1, 513), (40, 40), (5, 130), (0, 9), (1, 16), (33, 65), (2, 400))
LONG = (((1, 2000), (1, 511), (1, 513)), ((3, 1100), (70, 1030)))


def rows(batch: Batch, out: torch.Tensor, sequence: int) -> torch.Tensor:
    return out[int(batch.query_starts[sequence]) : int(batch.query_starts[sequence + 1])]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_sequence_alone_gives_the_bits_of_the_batch(dtype: torch.dtype) -> None:
    batch = build(Case(lens=LENS, heads=(14, 2), dtype=dtype))
    out, lse = batch.attend()
    for s in range(len(LENS)):
        alone, alone_lse = batch.only([s]).attend()
        assert_same_bits(alone, rows(batch, out, s))
        assert_same_bits(alone_lse, rows(batch, lse, s))


def test_the_order_of_the_batch_does_not_matter() -> None:
    batch = build(Case(lens=LENS))
    out, _ = batch.attend()
    order = [4, 6, 0, 5, 3, 1, 2]
    permuted = batch.only(order)
    permuted_out, _ = permuted.attend()
    for i, s in enumerate(order):
        assert_same_bits(rows(permuted, permuted_out, i), rows(batch, out, s))


def test_a_neighbour_that_grows_does_not_matter() -> None:
    outs = []
    batch = build(Case(lens=((1, 200), (64, 300)), dtype=torch.bfloat16))
    for query_len in (1, 2, 9, 10, 17, 64):
        neighbour = replace(
            batch,
            query=batch.query[: 1 + query_len],
            query_starts=torch.tensor([0, 1, 1 + query_len]),
        )
        outs.append(neighbour.attend()[0][0])
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


def test_threads_do_not_matter() -> None:
    batch = build(Case(lens=((128, 300), (1, 513), (70, 200)), heads=(10, 2)))
    expected, expected_lse = batch.attend(num_threads=1)
    for num_threads in (2, 7, 0):
        out, lse = batch.attend(num_threads=num_threads)
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("window", (0, 20))
def test_a_prompt_cut_in_chunks_gives_the_bits_of_the_whole(window: int) -> None:
    batch = build(Case(lens=((150, 150),), heads=(5, 1), window=window))
    whole, _ = batch.attend()
    for chunk in (1, 7, 64, 100):
        outs = []
        for start in range(0, 150, chunk):
            end = min(start + chunk, 150)
            part = replace(
                batch,
                query=batch.query[start:end],
                query_starts=torch.tensor([0, end - start]),
                context_lens=torch.tensor([end]),
            )
            outs.append(part.attend()[0])
        assert_same_bits(torch.cat(outs), whole)


@pytest.mark.parametrize("block_size", (1, 5, 64))
def test_block_size_and_place_of_blocks_do_not_matter(block_size: int) -> None:
    batch = build(Case(lens=LENS))
    moved = build(Case(lens=LENS, block_size=block_size))
    CpuKernels().reshape_and_cache(replace(moved, key=batch.key, value=batch.value).to_write())
    assert_same_bits(replace(moved, query=batch.query).attend()[0], batch.attend()[0])


def test_strides_do_not_matter() -> None:
    batch = build(Case(lens=LENS))
    expected, _ = batch.attend()
    pool = torch.full((batch.pages.shape[0], 3, *batch.pages.shape[1:]), torch.nan)
    pool[:, 1] = batch.pages
    wide = torch.full((*batch.query.shape[:1], 3, *batch.query.shape[1:]), torch.nan)
    wide[:, 0] = batch.query
    wide_tables = batch.block_tables.repeat(1, 2)
    tokens_first = batch.pages.permute(0, 1, 3, 2, 4).contiguous().permute(0, 1, 3, 2, 4)
    for strided in (
        replace(batch, pages=pool[:, 1]),
        replace(batch, pages=tokens_first),
        replace(batch, query=wide.unbind(1)[0]),
        replace(batch, query=batch.query.transpose(0, 1).contiguous().transpose(0, 1)),
        replace(batch, block_tables=wide_tables[:, : batch.block_tables.shape[1]]),
        replace(batch, block_tables=batch.block_tables.int()),
        replace(batch, context_lens=batch.context_lens.repeat_interleave(2)[::2]),
    ):
        assert_same_bits(strided.attend()[0], expected)


@pytest.mark.parametrize(
    "lens",
    # Few items: all are computed by splits. Many: the last ones.
    [((1, 2000), (1, 511), (1, 513)), ((3, 1100), (70, 1030)), ((1, 1100),) * 9],
    ids=str,
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_splits_shared_out_to_threads_give_the_bits_of_one_thread(
    dtype: torch.dtype, lens: tuple[tuple[int, int], ...]
) -> None:
    batch = build(Case(lens=lens, heads=(4, 1), head_size=128, dtype=dtype))
    expected, expected_lse = batch.attend(num_threads=1)
    for num_threads in (2, 5):
        out, lse = batch.attend(num_threads=num_threads)
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)
