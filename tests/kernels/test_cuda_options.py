"""Soft caps, sinks, values smaller than keys and heads up to 512 in the CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from device_backends import DeviceBackend, chosen_backend, in_place_of_the_cpu
from kernel_cases import (
    FLOATS,
    FP8,
    Case,
    assert_as_exact_as_torch,
    assert_same_bits,
    build,
)

HALF, BFLOAT = torch.float16, torch.bfloat16
LENS = ((1, 150), (40, 45), (3, 70), (0, 0), (40, 300))
SIZES = ((16, 8), (72, 56), (128, 64), (192, 128), (256, 16), (320, 256), (512, 512), (512, 264))


@pytest.fixture(autouse=True)
def backend() -> Iterator[DeviceBackend]:
    with in_place_of_the_cpu(chosen_backend()) as backend:
        yield backend


@pytest.mark.parametrize("soft_cap", (0.3, 2.0, 50.0))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_soft_cap_is_right(dtype: torch.dtype, soft_cap: float) -> None:
    assert_as_exact_as_torch(Case(lens=LENS, heads=(2, 1), dtype=dtype, soft_cap=soft_cap))


@pytest.mark.parametrize("dtype", (torch.float32, BFLOAT), ids=str)
def test_a_cap_of_nothing_is_none_and_a_huge_one_changes_little(dtype: torch.dtype) -> None:
    batch = build(Case(lens=LENS, heads=(2, 1), dtype=dtype))
    plain, plain_lse = batch.attend()
    assert_same_bits(replace(batch, soft_cap=0.0).attend()[0], plain)
    _, lse = replace(batch, soft_cap=1e6).attend()
    torch.testing.assert_close(lse, plain_lse, rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sinks_are_right(dtype: torch.dtype) -> None:
    assert_as_exact_as_torch(Case(lens=LENS, heads=(6, 2), dtype=dtype, sinks=True))


@pytest.mark.parametrize("sink", (-1e30, -200.0, 200.0, 1e30))
@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
def test_a_sink_far_above_or_below_all_scores_does_no_harm(dtype: torch.dtype, sink: float) -> None:
    batch = build(Case(lens=LENS, heads=(2, 1), dtype=dtype))
    one = replace(batch, sinks=torch.full((2,), sink))
    out, lse = one.attend()
    exact, exact_lse = one.oracle(torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("head_size", "value_head_size"), SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_two_head_sizes_are_right(
    dtype: torch.dtype, head_size: int, value_head_size: int
) -> None:
    case = Case(lens=((1, 150), (9, 35), (20, 270)), heads=(6, 2), dtype=dtype)
    case = replace(case, head_size=head_size, value_head_size=value_head_size)
    assert_as_exact_as_torch(case)


@pytest.mark.parametrize("heads", ((1, 1), (3, 1), (16, 2)), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_options_meet(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    case = Case(lens=LENS, heads=heads, window=31, alibi=True, soft_cap=4.0, sinks=True)
    assert_as_exact_as_torch(replace(case, dtype=dtype, head_size=96, value_head_size=40))


@pytest.mark.parametrize("pages_dtype", FP8, ids=str)
@pytest.mark.parametrize(
    ("head_size", "value_head_size"), ((64, 0), (192, 128), (72, 24), (512, 0))
)
@pytest.mark.parametrize("dtype", (BFLOAT, torch.float32), ids=str)
def test_they_are_right_over_8_bits(
    dtype: torch.dtype, head_size: int, value_head_size: int, pages_dtype: torch.dtype
) -> None:
    case = Case(lens=LENS, heads=(4, 2), dtype=dtype, pages_dtype=pages_dtype, scales="head")
    case = replace(case, head_size=head_size, value_head_size=value_head_size)
    assert_as_exact_as_torch(replace(case, soft_cap=1.5, sinks=True))


def test_no_bit_of_them_depends_on_the_batch() -> None:
    case = Case(lens=((1, 400), (70, 300), (1, 33)), heads=(4, 2), dtype=BFLOAT)
    case = replace(case, head_size=192, value_head_size=128, soft_cap=1.5, sinks=True)
    batch = build(case)
    expected, _ = batch.attend()
    for sequence, rows in enumerate((slice(0, 1), slice(1, 71), slice(71, 72))):
        assert_same_bits(batch.only([sequence]).attend()[0], expected[rows])
