"""Numbers at the ends of their types: NaN, numbers and scales far from one, weights near zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import DeviceBackend
from kernel_cases import FLOATS, FP8, Case, assert_same_bits, build, with_pages
from test_oracle_bits import assert_same, at_an_odd_address

from data_plane.kernels.backend import Kernels

BF16, HALF, (E4M3, E5M2) = torch.bfloat16, torch.float16, FP8
LENS = ((1, 150), (40, 45), (3, 70), (0, 0), (1, 1))


def test_an_empty_batch_gives_an_empty_answer(backend: Kernels) -> None:
    batch = build(Case(lens=((0, 5), (0, 0))))
    out, lse = batch.attend()
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_a_window_leaves_the_blocks_before_it_unread(backend: Kernels) -> None:
    batch = build(Case(lens=((1, 100),), window=16, dtype=HALF))
    expected = batch.attend()
    batch.block_tables[0, : 84 // 16] = -1
    assert_same(batch.attend(), expected)


def test_scores_far_from_zero_do_not_overflow(backend: Kernels) -> None:
    batch = build(Case(lens=((4, 90),)))
    for factor in (1e3, 1e18):
        large = replace(batch, query=batch.query * factor)
        out, lse = large.attend()
        exact, exact_lse = large.oracle(torch.float64)
        torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
def test_a_sink_far_above_or_below_all_scores_does_no_harm(
    backend: Kernels, dtype: torch.dtype
) -> None:
    batch = build(Case(lens=LENS, heads=(2, 1), dtype=dtype))
    for sink in (-1e30, -200.0, 200.0, 1e30):
        one = replace(batch, sinks=torch.full((2,), sink))
        out, lse = one.attend()
        exact, exact_lse = one.oracle(torch.float64)
        rounded = 1e-5 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(out.double(), exact, rtol=rounded, atol=rounded)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
def test_a_cap_of_nothing_is_none_and_a_huge_one_changes_little(
    backend: Kernels, dtype: torch.dtype
) -> None:
    batch = build(Case(lens=LENS, heads=(2, 1), dtype=dtype))
    plain = batch.attend()
    assert_same(replace(batch, soft_cap=0.0).attend(), plain)
    _, lse = replace(batch, soft_cap=1e6).attend()
    torch.testing.assert_close(lse, plain[1], rtol=2e-6, atol=5e-6)
    assert (replace(batch, soft_cap=1e-30).attend()[0] - plain[0]).abs().max() > 0.1


@pytest.mark.parametrize("query_len", (10, 40))
@pytest.mark.parametrize(
    ("dtype", "pages_dtype"),
    (*((dtype, dtype) for dtype in FLOATS), (torch.float32, E4M3), (HALF, E4M3), (BF16, E5M2)),
    ids=str,
)
def test_a_nan_that_is_visible_spoils_just_the_rows_that_see_it(
    backend: Kernels, dtype: torch.dtype, pages_dtype: torch.dtype, query_len: int
) -> None:
    case = Case(lens=((query_len, query_len), (1, 3)), heads=(2, 1), dtype=dtype)
    batch = build(replace(case, pages_dtype=pages_dtype))
    block = int(batch.block_tables[0, 0])
    for key_or_value in (0,) if isinstance(backend, DeviceBackend) else (0, 1):
        pages = batch.pages.clone()
        pages[block, key_or_value, 0, 6] = torch.nan
        out, _ = replace(batch, pages=pages).attend()
        assert out[6:query_len].isnan().all()
        assert not out[:6].isnan().any() and not out[query_len:].isnan().any()


@pytest.mark.parametrize("head_size", (16, 128, 144, 256))
@pytest.mark.parametrize("heads", ((1, 1), (4, 1), (9, 1)), ids=str)
def test_a_nan_in_a_tile_changes_no_bit_of_the_rows_that_do_not_see_it(
    cpu: str, heads: tuple[int, int], head_size: int
) -> None:
    batch = build(Case(((10, 10), (1, 3)), heads, head_size, dtype=BF16, pages_dtype=E4M3))
    expected, _ = batch.attend()
    block = int(batch.block_tables[0, 0])
    for key_or_value, column, code in ((0, 0, 0x7F), (1, head_size - 1, 0xFF)):
        pages = batch.pages.clone()
        pages.view(torch.uint8)[block, key_or_value, 0, 6, column] = code
        out, _ = replace(batch, pages=pages).attend()
        assert_same_bits(out[:6], expected[:6])
        assert_same_bits(out[10:], expected[10:])
        spoilt = out[6:10] if key_or_value == 0 else out[6:10, :, column]
        assert spoilt.isnan().all()
        if key_or_value == 1:
            assert_same_bits(out[6:10, :, :column], expected[6:10, :, :column])


@pytest.mark.parametrize(
    ("dtype", "pages_dtype"),
    (*((dtype, dtype) for dtype in FLOATS), (HALF, E4M3), (BF16, E4M3)),
    ids=str,
)
@pytest.mark.parametrize("query_len", (1, 40))
def test_many_small_weights_are_not_lost(
    backend: Kernels, query_len: int, dtype: torch.dtype, pages_dtype: torch.dtype
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


def test_scales_far_from_one_do_not_overflow(backend: Kernels) -> None:
    batch = build(Case(lens=LENS, heads=(4, 2), pages_dtype=E5M2))
    for factor in (1e-30, 1e30):
        scales = torch.tensor([factor])
        far = replace(batch, value=batch.value * factor, value_scales=scales)
        far.write()
        exact, _ = far.oracle(torch.float64)
        torch.testing.assert_close(
            far.attend()[0].double() / factor, exact / factor, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("query_len", (1, 40))
def test_queries_of_any_magnitude_are_taken_as_exactly(
    device: DeviceBackend, query_len: int
) -> None:
    case = Case(lens=((query_len, 50),), dtype=BF16, pages_dtype=E4M3, heads=(4, 1))
    batch = build(case)
    for power in (2.0**-120, 2.0**-20, 2.0**20, 2.0**100):
        query = batch.query * power  # As bf16, the smallest lose bits here.
        answer = replace(batch, query=query, scale=batch.scale / power).attend()
        ordinary = replace(batch, query=(query.double() / power).bfloat16())
        assert_same(answer, ordinary.attend())


@pytest.mark.parametrize("query_len", (1, 40))
def test_rows_of_other_magnitudes_do_not_matter(device: DeviceBackend, query_len: int) -> None:
    """Each row has a scale of its own: one that is wrong here is wrong by a power of two."""
    batch = build(Case(lens=((query_len, 50),), dtype=BF16, pages_dtype=E5M2, heads=(16, 1)))
    expected, _ = batch.attend()
    powers = 2.0 ** (torch.arange(query_len * 16) % 37 - 18).view(query_len, 16, 1)
    large = replace(batch, query=(batch.query * powers).bfloat16())
    for row in range(0, 16, 3):
        token = row * (query_len - 1) // 15
        scaled = replace(large, scale=batch.scale / float(powers[token, row]))
        assert_same_bits(scaled.attend()[0][token, row], expected[token, row])


@pytest.mark.parametrize("query_len", (1, 40))
@pytest.mark.parametrize(
    ("dtype", "power", "key_scale"),
    (
        (HALF, 1.0, 3e38),
        (BF16, 1.0, 3e38),
        (BF16, 2.0**60, 1e30),
        (torch.float32, 1.0, 3e38),
    ),
    ids=str,
)
def test_a_key_of_zeros_has_a_score_of_zero_at_any_scale(
    device: DeviceBackend, dtype: torch.dtype, power: float, key_scale: float, query_len: int
) -> None:
    case = Case(lens=((query_len, 50),), dtype=dtype, pages_dtype=E4M3, heads=(4, 1), scales="head")
    batch = build(case)
    batch.key.zero_()
    scales = torch.tensor([key_scale])
    batch = replace(batch, query=batch.query * power, key_scales=scales, scale=1.0)
    batch.write()
    expected = replace(batch, key_scales=None).attend()
    assert not expected[0].isnan().any()
    assert_same(batch.attend(), expected)


@pytest.mark.parametrize("query_len", (1, 40))
def test_values_may_be_scaled_by_a_number_near_the_smallest(
    device: DeviceBackend, query_len: int
) -> None:
    case = Case(lens=((query_len, 50),), dtype=BF16, pages_dtype=E4M3, heads=(4, 1))
    batch = build(case)
    batch.value.abs_().add_(1).mul_(100)
    batch.write()
    exact, _ = batch.oracle(torch.float64)
    out, _ = replace(batch, value_scales=torch.tensor([1e-40])).attend()
    torch.testing.assert_close(out.double() * 1e40, exact, rtol=0.02, atol=0)


@pytest.mark.parametrize(("pages_dtype", "offset"), ((BF16, 1), (E4M3, 8)), ids=str)
def test_pages_that_no_16_bytes_fit_are_taken_all_the_same(
    device: DeviceBackend, pages_dtype: torch.dtype, offset: int
) -> None:
    case = Case(lens=((1, 100), (20, 50)), dtype=BF16, head_size=24)
    batch = build(with_pages(case, pages_dtype))
    exact, _ = batch.oracle(torch.float64)
    out, _ = replace(batch, pages=at_an_odd_address(batch.pages, offset)).attend()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.02)
