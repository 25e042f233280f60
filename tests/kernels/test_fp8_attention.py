"""Attention over fp8 pages gives what float64 gives of the numbers that the pages hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kvplane_kernels as native
import pytest
import torch
from kernel_cases import (
    FLOATS,
    FP8,
    Batch,
    Case,
    assert_as_exact_as_8_bits,
    assert_as_exact_as_torch,
    assert_same_bits,
    build,
    has_bits_of_its_own,
)

E4M3, E5M2 = FP8
BF16 = torch.bfloat16
SCALES = (None, "tensor", "head")
GROUPS = (1, 4, 5, 7)
HEAD_SIZES = (8, 64, 72, 80, 128, 192, 256)
BLOCK_SIZES = (1, 5, 16)
LENS = ((1, 70), (9, 35), (0, 0), (1, 1), (2, 33))
TWO_HEADS = Case(lens=LENS, heads=(4, 2), head_size=128, dtype=BF16, pages_dtype=E4M3)

every_cpu_isa = pytest.mark.usefixtures("every_cpu_isa")


def on_each_isa() -> Iterator[str]:
    """Every instruction set in turn, within one test, which computes what is expected once."""
    before = native.cpu_isa()
    try:
        for isa in native.cpu_isas():
            native.use_cpu_isa(isa)
            yield isa
    finally:
        native.use_cpu_isa(before)


@every_cpu_isa
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("pages_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_query_reads_both_types_with_any_scales(
    dtype: torch.dtype, pages_dtype: torch.dtype, scales: Any
) -> None:
    case = Case(lens=LENS, heads=(6, 3), dtype=dtype, pages_dtype=pages_dtype, scales=scales)
    assert_as_exact_as_torch(case)
    assert_as_exact_as_8_bits(case)


@every_cpu_isa
@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_any_head_size_is_right(head_size: int, dtype: torch.dtype) -> None:
    case = replace(TWO_HEADS, head_size=head_size, dtype=dtype, scales="head")
    assert_as_exact_as_torch(case)


@every_cpu_isa
@pytest.mark.parametrize("group", GROUPS)
def test_any_group_of_query_heads_is_right(group: int) -> None:
    for head_size in (80, 128):
        case = replace(TWO_HEADS, heads=(2 * group, 2), head_size=head_size, scales="head")
        assert_as_exact_as_torch(case)


@every_cpu_isa
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_any_block_size_is_right(block_size: int) -> None:
    assert_as_exact_as_torch(replace(TWO_HEADS, block_size=block_size, scales="head"))


@every_cpu_isa
@pytest.mark.parametrize(("window", "alibi"), ((0, True), (7, False), (31, True)))
@pytest.mark.parametrize("head_size", (72, 64))
def test_windows_and_alibi_are_right(window: int, alibi: bool, head_size: int) -> None:
    lens = ((1, 300), (40, 100), (33, 33))
    case = replace(TWO_HEADS, lens=lens, window=window, alibi=alibi, head_size=head_size)
    assert_as_exact_as_torch(replace(case, scales="tensor"))


def random_fp8_case(seed: int, longest: int) -> Case:
    rng = random.Random(seed)
    num_kv_heads = rng.choice((1, 2, 3, 8))
    contexts = [rng.randint(1, longest) for _ in range(4)]
    return Case(
        lens=tuple((rng.choice((0, 1, 1, min(c, rng.randint(1, 100)), c)), c) for c in contexts),
        heads=(num_kv_heads * rng.randint(1, 8), num_kv_heads),
        head_size=8 * rng.randint(1, 32),
        block_size=rng.choice((1, 5, 8, 16, 32, 64, 256)),
        dtype=rng.choice(FLOATS),
        pages_dtype=rng.choice(FP8),
        scales=rng.choice(SCALES),  # type: ignore[arg-type]
        window=rng.choice((0, 0, 1, 30, 64)),
        alibi=rng.random() < 0.3,
        table_dtype=rng.choice((torch.int32, torch.int64)),
        seed=seed,
    )


@every_cpu_isa
@pytest.mark.parametrize("case", [random_fp8_case(seed, 200) for seed in range(4)], ids=str)
def test_random_batches_are_right(case: Case) -> None:
    assert_as_exact_as_torch(case)


@every_cpu_isa
@pytest.mark.nightly
@pytest.mark.parametrize("case", [random_fp8_case(seed, 700) for seed in range(50, 150)], ids=str)
def test_many_random_batches_are_right(case: Case) -> None:
    assert_as_exact_as_torch(case)
    assert_as_exact_as_8_bits(case)


@pytest.mark.nightly
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_whole_matrix_is_right(dtype: torch.dtype, head_size: int) -> None:
    for choice in itertools.product(FP8, SCALES, GROUPS, BLOCK_SIZES):
        pages_dtype, scales, group, block_size = choice
        case = Case(
            lens=LENS,
            heads=(2 * group, 2),
            head_size=head_size,
            block_size=block_size,
            dtype=dtype,
            pages_dtype=pages_dtype,
            scales=scales,
        )
        for _ in on_each_isa():
            assert_as_exact_as_torch(case)


@every_cpu_isa
def test_numbers_that_fp8_holds_exactly_give_the_bits_of_bf16_pages() -> None:
    for head_size, scale in ((80, 1.0), (128, 1.0), (128, 0.25)):
        batch = build(replace(TWO_HEADS, head_size=head_size))
        key, value = (t.to(E4M3).to(BF16) * scale for t in (batch.key, batch.value))
        scales = torch.tensor([scale])
        narrow = replace(batch, key=key, value=value, key_scales=scales, value_scales=scales)
        narrow.write()
        wide = replace(batch, key=key, value=value, pages=batch.pages.to(BF16))
        wide.write()
        for ours, theirs in zip(narrow.attend(), wide.attend(), strict=True):
            assert_same_bits(ours, theirs)


@every_cpu_isa
@pytest.mark.parametrize("head_size", (72, 128))
@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
def test_batch_threads_strides_and_block_size_do_not_matter(
    dtype: torch.dtype, head_size: int
) -> None:
    lens = ((1, 1100), (40, 40), (5, 130), (1, 16), (2, 400))
    case = replace(TWO_HEADS, lens=lens, dtype=dtype, head_size=head_size, scales="head")
    batch = build(case)
    out, lse = batch.attend()
    starts = batch.query_starts.tolist()
    for s in range(len(lens)):
        alone, alone_lse = batch.only([s]).attend()
        assert_same_bits(alone, out[starts[s] : starts[s + 1]])
        assert_same_bits(alone_lse, lse[starts[s] : starts[s + 1]])
    there = build(replace(case, block_size=5))
    moved = replace(batch, pages=there.pages, block_tables=there.block_tables, slots=there.slots)
    moved.write()
    others = [batch.attend(num_threads=7), batch.only([0, 1, 2, 3, 4]).attend(num_threads=2)]
    others += [strided.attend() for strided in (moved, *with_other_strides(batch))]
    for other, other_lse in others:
        assert_same_bits(other, out)
        assert_same_bits(other_lse, lse)


def with_other_strides(batch: Batch) -> list[Batch]:
    """The same numbers at other places in memory."""
    pool = torch.full((batch.pages.shape[0], 3, *batch.pages.shape[1:]), torch.nan).to(E4M3)
    pool[:, 1] = batch.pages
    tokens_first = batch.pages.permute(0, 1, 3, 2, 4).contiguous().permute(0, 1, 3, 2, 4)
    room = torch.zeros(batch.pages.numel() + 1, dtype=E4M3)
    odd = room[1:].view(batch.pages.shape)
    odd.copy_(batch.pages)
    assert batch.key_scales is not None
    every_other = batch.key_scales.repeat_interleave(2)[::2]
    return [
        replace(batch, pages=pool[:, 1]),
        replace(batch, pages=tokens_first),
        replace(batch, pages=odd),
        replace(batch, key_scales=every_other),
    ]


@every_cpu_isa
def test_a_prompt_cut_in_chunks_gives_the_bits_of_the_whole() -> None:
    for head_size in (72, 128):
        case = replace(TWO_HEADS, lens=((100, 100),), heads=(5, 1), head_size=head_size)
        batch = build(replace(case, scales="head"))
        whole, _ = batch.attend()
        for chunk in (1, 2, 7, 64):
            outs = []
            for start in range(0, 100, chunk):
                end = min(start + chunk, 100)
                part = replace(
                    batch,
                    query=batch.query[start:end],
                    query_starts=torch.tensor([0, end - start]),
                    context_lens=torch.tensor([end]),
                )
                outs.append(part.attend()[0])
            assert_same_bits(torch.cat(outs), whole)


@every_cpu_isa
def test_a_nan_in_a_visible_value_spoils_just_the_rows_that_see_it() -> None:
    for dtype, head_size in itertools.product((torch.float32, BF16), (72, 128)):
        case = replace(TWO_HEADS, lens=((10, 10), (1, 3)), heads=(2, 1), dtype=dtype)
        batch = build(replace(case, head_size=head_size))
        block, offset = int(batch.block_tables[0, 0]), 6
        batch.pages[block, 1, 0, offset] = torch.nan
        out, _ = batch.attend()
        assert out[6:10].isnan().all() and not out[:6].isnan().any() and not out[10:].isnan().any()


@every_cpu_isa
def test_scales_far_from_one_do_not_overflow() -> None:
    case = replace(TWO_HEADS, dtype=torch.float32, pages_dtype=E5M2)
    batch = build(case)
    for factor in (1e-30, 1e30):
        scales = torch.tensor([factor])
        far = replace(batch, value=batch.value * factor, value_scales=scales)
        far.write()
        exact, _ = far.oracle(torch.float64)
        torch.testing.assert_close(
            far.attend()[0].double() / factor, exact / factor, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("pages_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sets_give_the_same_bits_but_where_they_fuse_products_and_sums(
    dtype: torch.dtype, pages_dtype: torch.dtype
) -> None:
    for head_size in (72, 128):
        case = replace(TWO_HEADS, lens=((1, 600), (20, 70)), head_size=head_size, dtype=dtype)
        batch = build(replace(case, pages_dtype=pages_dtype, scales="head"))
        answers = {isa: batch.attend() for isa in on_each_isa()}
        expected, expected_lse = answers["baseline"]
        for isa, (out, lse) in answers.items():
            if has_bits_of_its_own(isa, dtype, pages_dtype, head_size):
                torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=5e-6)
            else:
                assert_same_bits(out, expected)
                assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("head_size", (16, 128, 144, 256))
@pytest.mark.parametrize("heads", ((1, 1), (4, 1), (9, 1)), ids=str)
def test_a_nan_in_a_tile_changes_no_bit_of_the_rows_that_do_not_see_it(
    heads: tuple[int, int], head_size: int
) -> None:
    case = Case(((10, 10), (1, 3)), heads, head_size, dtype=BF16, pages_dtype=FP8[0])
    for isa in on_each_isa():
        batch = build(case)
        expected, _ = batch.attend()
        block = int(batch.block_tables[0, 0])
        for key_or_value, column, code in ((0, 0, 0x7F), (1, head_size - 1, 0xFF)):
            pages = batch.pages.clone()
            pages.view(torch.uint8)[block, key_or_value, 0, 6, column] = code
            out, _ = replace(batch, pages=pages).attend()
            assert_same_bits(out[:6], expected[:6])
            assert_same_bits(out[10:], expected[10:])
            spoilt = out[6:10] if key_or_value == 0 else out[6:10, :, column]
            assert spoilt.isnan().all(), isa
            if key_or_value == 1:
                assert_same_bits(out[6:10, :, :column], expected[6:10, :, :column])
