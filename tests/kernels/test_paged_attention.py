"""Paged attention gives what float64 gives, over shapes, dtypes, options and ragged batches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from kernel_cases import FLOATS, Case, assert_as_exact_as_torch, build

pytestmark = pytest.mark.usefixtures("every_cpu_isa")

EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513)
HEADS = ((32, 8), (40, 40), (64, 8), (28, 4), (9, 3), (5, 1), (6, 1), (16, 1), (71, 1), (1, 1))
HEAD_SIZES = (8, 32, 56, 64, 72, 80, 96, 112, 120, 128, 192, 256)
BLOCK_SIZES = (1, 5, 8, 16, 32, 64, 128, 256)
OPTIONS = ((0, True), (1, False), (7, False), (31, True), (64, False), (256, True))
MIXED = (
    ((1, 1328), (5, 18), (129, 463)),
    ((1, 523), (1, 37), (1, 2011)),
    ((0, 0), (7, 7), (0, 50), (1, 1), (64, 65), (3, 100)),
)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_decode_is_right_at_every_edge_of_a_block_and_a_tile(block_size: int) -> None:
    lens = ((0, 0), *((1, n) for n in EDGES))
    assert_as_exact_as_torch(Case(lens=lens, block_size=block_size, head_size=32))


@pytest.mark.parametrize("lens", [((n, n),) for n in EDGES[:13]], ids=str)
def test_prefill_is_right_at_every_edge(lens: tuple[tuple[int, int], ...]) -> None:
    assert_as_exact_as_torch(Case(lens=lens, head_size=32))


@pytest.mark.parametrize("query_len", (2, 16, 17, 33, 70))
def test_append_over_a_cached_prefix_is_right(query_len: int) -> None:
    lens = tuple((query_len, query_len + prefix) for prefix in (0, 1, 15, 16, 100, 129))
    assert_as_exact_as_torch(Case(lens=lens))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_any_group_of_query_heads_is_right(heads: tuple[int, int]) -> None:
    assert_as_exact_as_torch(Case(heads=heads, lens=((1, 70), (9, 35))))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_any_head_size_is_right(head_size: int) -> None:
    assert_as_exact_as_torch(Case(head_size=head_size))


@pytest.mark.parametrize("pages_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes_of_queries_and_pages_mix(dtype: torch.dtype, pages_dtype: torch.dtype) -> None:
    lens = ((1, 200), (20, 50))
    assert_as_exact_as_torch(Case(lens=lens, dtype=dtype, pages_dtype=pages_dtype, head_size=80))


@pytest.mark.parametrize(("window", "alibi"), OPTIONS)
def test_sliding_windows_and_alibi_are_right(window: int, alibi: bool) -> None:
    lens = ((1, 300), (40, 100), (33, 33), (1, 64), (1, 5))
    assert_as_exact_as_torch(Case(lens=lens, window=window, alibi=alibi, heads=(6, 2)))


@pytest.mark.parametrize("lens", MIXED, ids=str)
def test_ragged_mixes_are_right(lens: tuple[tuple[int, int], ...]) -> None:
    case = Case(lens=lens, head_size=32, dtype=torch.bfloat16, table_dtype=torch.int32)
    assert_as_exact_as_torch(case)


def test_an_empty_batch_gives_an_empty_answer() -> None:
    batch = build(Case(lens=((0, 5), (0, 0))))
    out, lse = batch.attend()
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_a_window_leaves_the_blocks_before_it_unread() -> None:
    batch = build(Case(lens=((1, 100),), window=16))
    expected, _ = batch.attend()
    batch.block_tables[0, : 84 // 16] = -1
    out, _ = batch.attend()
    assert torch.equal(out, expected)


def test_scores_far_from_zero_do_not_overflow() -> None:
    batch = build(Case(lens=((4, 90),)))
    for factor in (1e3, 1e18):
        large = replace(batch, query=batch.query * factor)
        out, lse = large.attend()
        exact, exact_lse = large.oracle(torch.float64)
        torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=0)


def test_a_nan_in_a_visible_key_spoils_just_the_rows_that_see_it() -> None:
    batch = build(Case(lens=((10, 10), (1, 3)), heads=(2, 1)))
    block, offset = int(batch.block_tables[0, 0]), 6
    batch.pages[block, 0, 0, offset, 0] = torch.nan
    out, _ = batch.attend()
    assert out[6:10].isnan().all() and not out[:6].isnan().any() and not out[10:].isnan().any()


def random_case(seed: int, longest: int) -> Case:
    rng = random.Random(seed)
    num_kv_heads = rng.choice((1, 2, 3, 8))
    contexts = [rng.choice((rng.randint(1, longest), rng.choice(EDGES[:13]))) for _ in range(5)]
    return Case(
        lens=tuple((rng.choice((0, 1, 1, min(c, rng.randint(1, 200)), c)), c) for c in contexts),
        heads=(num_kv_heads * rng.randint(1, 8), num_kv_heads),
        head_size=8 * rng.randint(1, 32),
        block_size=rng.choice(BLOCK_SIZES),
        dtype=rng.choice(FLOATS),
        pages_dtype=rng.choice((None, *FLOATS)),
        window=rng.choice((0, 0, 1, 30, 64, 256)),
        alibi=rng.random() < 0.3,
        table_dtype=rng.choice((torch.int32, torch.int64)),
        seed=seed,
    )


@pytest.mark.parametrize("case", [random_case(seed, 200) for seed in range(6)], ids=str)
def test_random_batches_are_right(case: Case) -> None:
    assert_as_exact_as_torch(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [random_case(seed, 900) for seed in range(100, 300)], ids=str)
def test_many_random_batches_are_right(case: Case) -> None:
    assert_as_exact_as_torch(case)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_long_ragged_mixes_are_right(head_size: int, dtype: torch.dtype) -> None:
    lens = ((992, 2456), (1, 1234), (98, 1145), (1, 4162), (1345, 1345))
    assert_as_exact_as_torch(Case(lens=lens, head_size=head_size, dtype=dtype))
