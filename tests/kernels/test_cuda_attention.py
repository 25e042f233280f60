"""The CUDA kernels pass the cases that the CPU's pass: emulated, or on a GPU.

``device_backends`` says how the backend is chosen. Emulated, a sample of the matrix is run on each
push, spread over the seeds of the emulator's scheduler; the nightly tier runs more of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from device_backends import DeviceBackend, chosen_backend, in_place_of_the_cpu
from kernel_cases import FLOATS, Batch, Case, assert_as_exact_as_torch, assert_same_bits, build
from test_paged_attention import EDGES, HEAD_SIZES, HEADS, MIXED, OPTIONS, random_case

SEEDS = range(4)
HALVES = (torch.float16, torch.bfloat16)
LENS = ((1, 200), (40, 40), (5, 130), (0, 9), (1, 16), (33, 65), (2, 300))


@pytest.fixture(autouse=True)
def backend() -> Iterator[DeviceBackend]:
    with in_place_of_the_cpu(chosen_backend()) as backend:
        yield backend


def rows(batch: Batch, out: torch.Tensor, sequence: int) -> torch.Tensor:
    return out[int(batch.query_starts[sequence]) : int(batch.query_starts[sequence + 1])]


@pytest.mark.parametrize("seed", SEEDS)
def test_ragged_batches_are_right_in_any_order_of_warps(backend: DeviceBackend, seed: int) -> None:
    backend.set_seed(seed)
    for dtype in FLOATS:
        lens = ((1, 150), (5, 70), (40, 90), (0, 3), (1, 1))
        assert_as_exact_as_torch(Case(lens=lens, dtype=dtype, seed=seed))


@pytest.mark.parametrize("block_size", (1, 5, 16, 256))
def test_decode_is_right_at_every_edge_of_a_block_and_a_tile(block_size: int) -> None:
    lens = ((0, 0), *((1, n) for n in EDGES[:13]))
    dtype = torch.bfloat16 if block_size > 1 else torch.float32
    assert_as_exact_as_torch(Case(lens=lens, block_size=block_size, head_size=32, dtype=dtype))


def test_prefill_is_right_at_every_edge() -> None:
    lens = tuple((n, n) for n in EDGES[:13])
    assert_as_exact_as_torch(Case(lens=lens, head_size=32, dtype=torch.float16, heads=(1, 1)))


@pytest.mark.parametrize("query_len", (2, 16, 17, 33, 70))
def test_append_over_a_cached_prefix_is_right(query_len: int) -> None:
    lens = tuple((query_len, query_len + prefix) for prefix in (0, 1, 15, 16, 100, 129))
    assert_as_exact_as_torch(Case(lens=lens, dtype=torch.bfloat16, heads=(2, 1)))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_any_group_of_query_heads_is_right(heads: tuple[int, int]) -> None:
    assert_as_exact_as_torch(Case(heads=heads, lens=((1, 70), (3, 35)), dtype=torch.float16))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_any_head_size_is_right(head_size: int) -> None:
    dtype = HALVES[head_size // 8 % 2]
    lens = ((1, 70), (20, 40))
    assert_as_exact_as_torch(Case(head_size=head_size, dtype=dtype, lens=lens, heads=(3, 1)))


@pytest.mark.parametrize("heads", ((9, 1), (16, 1)), ids=str)
@pytest.mark.parametrize("head_size", (64, 128, 192, 256))
def test_wide_groups_of_any_head_size_are_right(head_size: int, heads: tuple[int, int]) -> None:
    lens = ((1, 70), (1, 5))
    assert_as_exact_as_torch(
        Case(head_size=head_size, dtype=torch.bfloat16, lens=lens, heads=heads)
    )


@pytest.mark.parametrize("pages_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes_of_queries_and_pages_mix(dtype: torch.dtype, pages_dtype: torch.dtype) -> None:
    lens = ((1, 100), (9, 30))
    assert_as_exact_as_torch(Case(lens=lens, dtype=dtype, pages_dtype=pages_dtype, head_size=80))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("window", "alibi"), OPTIONS)
def test_sliding_windows_and_alibi_are_right(window: int, alibi: bool, dtype: torch.dtype) -> None:
    lens = ((1, 300), (40, 100), (3, 133), (1, 64), (1, 5))
    assert_as_exact_as_torch(Case(lens=lens, window=window, alibi=alibi, heads=(3, 1), dtype=dtype))


def test_a_ragged_mix_is_right() -> None:
    case = Case(lens=((1, 523), (5, 18), (129, 463)), head_size=32, dtype=torch.bfloat16)
    assert_as_exact_as_torch(replace(case, table_dtype=torch.int32))


@pytest.mark.parametrize("case", [random_case(seed, 200) for seed in range(6)], ids=str)
def test_random_batches_are_right(backend: DeviceBackend, case: Case) -> None:
    backend.set_seed(case.seed)
    assert_as_exact_as_torch(case)


@pytest.mark.parametrize("num_sequences", (31, 32, 33, 70, 1100))
def test_batches_of_many_sequences_are_right(num_sequences: int) -> None:
    rng = random.Random(num_sequences)
    # Most of the many have no query tokens: these are quick, and still in the plan.
    busy = [rng.random() < 40 / num_sequences for _ in range(num_sequences)]
    contexts = [rng.choice((1, 5, 70)) for _ in range(num_sequences)]
    lens = tuple(
        (min(c, rng.choice((1, 1, 40))) * b, c) for b, c in zip(busy, contexts, strict=True)
    )
    assert_as_exact_as_torch(Case(lens=lens, heads=(1, 1), head_size=8, dtype=torch.float16))


def test_an_empty_batch_gives_an_empty_answer() -> None:
    batch = build(Case(lens=((0, 5), (0, 0))))
    out, lse = batch.attend()
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_in_a_visible_key_spoils_just_the_rows_that_see_it(dtype: torch.dtype) -> None:
    for lens in (((10, 10), (1, 3)), ((40, 40), (1, 3))):
        batch = build(Case(lens=lens, heads=(2, 1), dtype=dtype))
        block, offset = int(batch.block_tables[0, 0]), 6
        batch.pages[block, 0, 0, offset, 0] = torch.nan
        out, _ = batch.attend()
        spoilt = out[6 : lens[0][0]]
        assert spoilt.isnan().all()
        assert not out[:6].isnan().any() and not out[lens[0][0] :].isnan().any()


def test_a_window_leaves_the_blocks_before_it_unread() -> None:
    batch = build(Case(lens=((1, 100),), window=16, dtype=torch.float16))
    expected, _ = batch.attend()
    batch.block_tables[0, : 84 // 16] = -1
    out, _ = batch.attend()
    assert_same_bits(out, expected)


def test_scores_far_from_zero_do_not_overflow() -> None:
    batch = build(Case(lens=((4, 90),)))
    for factor in (1e3, 1e18):
        large = replace(batch, query=batch.query * factor)
        out, lse = large.attend()
        exact, exact_lse = large.oracle(torch.float64)
        torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("dtype", "pages_dtype"),
    (
        *((dtype, dtype) for dtype in FLOATS),
        (torch.float16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn),
    ),
    ids=str,
)
@pytest.mark.parametrize("query_len", (1, 40))
def test_many_small_weights_are_not_lost(
    query_len: int, dtype: torch.dtype, pages_dtype: torch.dtype
) -> None:
    """One key takes nearly all of the weight: 2^-26 is left for each of the others."""
    case = Case(lens=((query_len, 200),), heads=(2, 2), dtype=dtype)
    batch = build(replace(case, pages_dtype=pages_dtype))
    batch.query.fill_(1)
    batch.key.zero_()[0] = 2.25  # times 64 dims, over 8: a score of 18
    batch.value.fill_(448)[0] = 0
    batch.write()
    out, _ = batch.attend()
    exact, _ = batch.oracle(torch.float64)
    assert (exact > 0.001).all()
    torch.testing.assert_close(out.double(), exact, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_sequence_alone_gives_the_bits_of_the_batch(dtype: torch.dtype) -> None:
    batch = build(Case(lens=LENS, heads=(14, 2), dtype=dtype))
    out, lse = batch.attend()
    for s in range(len(LENS)):
        alone, alone_lse = batch.only([s]).attend()
        assert_same_bits(alone, rows(batch, out, s))
        assert_same_bits(alone_lse, rows(batch, lse, s))


def test_the_order_of_the_batch_and_of_the_warps_does_not_matter(backend: DeviceBackend) -> None:
    batch = build(Case(lens=LENS, dtype=torch.bfloat16))
    out, _ = batch.attend()
    order = [4, 6, 0, 5, 3, 1, 2]
    permuted = batch.only(order)
    backend.set_seed(7)
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


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_room_in_the_tables_and_a_known_query_length_do_not_matter(
    backend: DeviceBackend, dtype: torch.dtype
) -> None:
    batch = build(Case(lens=((1, 40), (2, 60), (1, 7)), dtype=dtype))
    expected, _ = batch.attend()
    wide = torch.nn.functional.pad(batch.block_tables, (0, 100), value=-1)
    for tables, max_query_len in ((wide, 0), (batch.block_tables, 2), (wide, 2)):
        arguments = replace(batch, block_tables=tables).to_attend()
        out = backend.paged_attention(replace(arguments, max_query_len=max_query_len))
        assert_same_bits(out, expected)


def test_splits_change_the_last_bits_at_most(backend: DeviceBackend) -> None:
    batch = build(Case(lens=((1, 300), (3, 129)), dtype=torch.float32))
    split, split_lse = batch.attend()
    with in_place_of_the_cpu(chosen_backend(split_tokens=512)):
        whole, whole_lse = batch.attend()
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split_lse, whole_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block_size", (1, 5, 64))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_block_size_and_place_of_blocks_do_not_matter(
    backend: DeviceBackend, block_size: int, dtype: torch.dtype
) -> None:
    lens = ((1, 200), (9, 130), (40, 65))
    batch = build(Case(lens=lens, dtype=dtype))
    moved = build(Case(lens=lens, block_size=block_size, dtype=dtype))
    backend.reshape_and_cache(replace(moved, key=batch.key, value=batch.value).to_write())
    assert_same_bits(replace(moved, query=batch.query).attend()[0], batch.attend()[0])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    batch = build(Case(lens=((1, 200), (9, 130), (40, 65)), dtype=dtype))
    expected, _ = batch.attend()
    pool = torch.full((batch.pages.shape[0], 3, *batch.pages.shape[1:]), torch.nan).to(dtype)
    pool[:, 1] = batch.pages
    wide = torch.full((*batch.query.shape[:1], 3, *batch.query.shape[1:]), torch.nan).to(dtype)
    wide[:, 0] = batch.query
    tokens_first = batch.pages.permute(0, 1, 3, 2, 4).contiguous().permute(0, 1, 3, 2, 4)
    for strided in (
        replace(batch, pages=pool[:, 1]),
        replace(batch, pages=tokens_first),
        replace(batch, query=wide.unbind(1)[0]),
        replace(batch, query=batch.query.transpose(0, 1).contiguous().transpose(0, 1)),
        replace(batch, block_tables=batch.block_tables.int()),
        replace(batch, context_lens=batch.context_lens.repeat_interleave(2)[::2]),
    ):
        assert_same_bits(strided.attend()[0], expected)


def test_tensors_that_no_16_bytes_fit_are_taken_all_the_same() -> None:
    batch = build(Case(lens=((1, 100), (20, 50)), dtype=torch.bfloat16, head_size=24))
    exact, _ = batch.oracle(torch.float64)
    room = torch.zeros(batch.pages.numel() + 1, dtype=torch.bfloat16)
    odd = room[1:].view(batch.pages.shape)
    odd.copy_(batch.pages)
    out, _ = replace(batch, pages=odd).attend()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.02)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [random_case(seed, 500) for seed in range(100, 160)], ids=str)
def test_many_random_batches_are_right(backend: DeviceBackend, case: Case) -> None:
    backend.set_seed(case.seed)
    assert_as_exact_as_torch(case)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lens", MIXED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_long_ragged_mixes_are_right(lens: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
    assert_as_exact_as_torch(Case(lens=lens, head_size=128, dtype=dtype))
