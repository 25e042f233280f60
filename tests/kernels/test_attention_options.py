"""Soft caps, sinks, values smaller than keys and heads up to 512, on every instruction set."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import kvplane_kernels as native
import pytest
import torch
from kernel_cases import (
    FLOATS,
    FP8,
    Case,
    assert_as_exact_as_torch,
    assert_same_bits,
    build,
)

from kvplane.errors import InvalidRequestError

pytestmark = pytest.mark.usefixtures("every_cpu_isa")

LENS = ((1, 600), (9, 35), (3, 40), (0, 0), (1, 1))
SIZES = ((16, 8), (72, 56), (128, 64), (192, 128), (256, 8), (512, 512), (320, 256), (512, 448))
CAPPED = Case(lens=LENS, soft_cap=1.5)
SINKING = Case(lens=LENS, sinks=True)


@pytest.mark.parametrize("soft_cap", (0.3, 2.0, 50.0))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_soft_cap_is_right(dtype: torch.dtype, soft_cap: float) -> None:
    assert_as_exact_as_torch(replace(CAPPED, dtype=dtype, soft_cap=soft_cap))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sinks_are_right(dtype: torch.dtype) -> None:
    assert_as_exact_as_torch(replace(SINKING, dtype=dtype))


@pytest.mark.parametrize(("head_size", "value_head_size"), SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_two_head_sizes_are_right(
    dtype: torch.dtype, head_size: int, value_head_size: int
) -> None:
    assert_as_exact_as_torch(
        Case(
            lens=((1, 70), (9, 35), (5, 600)),
            heads=(6, 2),
            head_size=head_size,
            value_head_size=value_head_size,
            dtype=dtype,
        )
    )


@pytest.mark.parametrize("heads", ((1, 1), (2, 1), (3, 1), (16, 2), (71, 1)), ids=str)
def test_options_meet(heads: tuple[int, int]) -> None:
    case = Case(lens=LENS, heads=heads, window=31, alibi=True, soft_cap=4.0, sinks=True)
    for dtype in FLOATS:
        assert_as_exact_as_torch(replace(case, dtype=dtype, head_size=96, value_head_size=40))


@pytest.mark.parametrize("pages_dtype", FP8, ids=str)
@pytest.mark.parametrize(("head_size", "value_head_size"), ((64, 0), (192, 128), (72, 24)))
def test_they_are_right_over_8_bits(
    head_size: int, value_head_size: int, pages_dtype: torch.dtype
) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = replace(
            CAPPED,
            dtype=dtype,
            pages_dtype=pages_dtype,
            scales="head",
            head_size=head_size,
            value_head_size=value_head_size,
            sinks=True,
        )
        assert_as_exact_as_torch(case)


def test_a_sink_far_above_or_below_all_scores_does_no_harm() -> None:
    batch = build(SINKING)
    for sink in (-1e30, -200.0, 200.0, 1e30):
        one = replace(batch, sinks=torch.full((4,), sink))
        out, lse = one.attend()
        exact, exact_lse = one.oracle(torch.float64)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def test_no_bit_of_them_depends_on_the_batch_or_the_threads() -> None:
    case = replace(CAPPED, sinks=True, head_size=192, value_head_size=128, dtype=torch.bfloat16)
    batch = build(replace(case, lens=((1, 4000), (70, 300), (1, 33))))
    expected, expected_lse = batch.attend()
    for num_threads in (2, 7):
        out, lse = batch.attend(num_threads=num_threads)
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)
    for sequence, rows in enumerate((slice(0, 1), slice(1, 71), slice(71, 72))):
        assert_same_bits(batch.only([sequence]).attend()[0], expected[rows])


def test_sets_agree_on_them(every_cpu_isa: str) -> None:
    case = replace(CAPPED, sinks=True, head_size=72, value_head_size=40, alibi=True)
    batch = build(case)
    out, _ = batch.attend()
    native.use_cpu_isa("baseline")
    expected, _ = batch.attend()
    native.use_cpu_isa(every_cpu_isa)
    assert_same_bits(out, expected)


def test_a_cap_of_nothing_is_none_and_a_huge_one_changes_little() -> None:
    batch = build(Case(lens=LENS))
    plain, _ = batch.attend()
    assert_same_bits(replace(batch, soft_cap=0.0).attend()[0], plain)
    torch.testing.assert_close(replace(batch, soft_cap=1e6).attend()[0], plain)
    assert (replace(batch, soft_cap=1e-30).attend()[0] - plain).abs().max() > 0.1


def test_they_are_refused_by_name() -> None:
    batch = build(Case(lens=((1, 20),)))
    with pytest.raises(InvalidRequestError, match="must be none or 4") as caught:
        replace(batch, sinks=torch.zeros(3)).to_attend()
    assert caught.value.field == "options.sinks"
    keys, values = batch.pages.unbind(1)
    for pages in ((values[..., :32], keys), (keys, values[1:]), (keys, values.half())):
        with pytest.raises(InvalidRequestError) as caught:
            replace(batch, pages=pages).to_attend()
        assert caught.value.field == "pages"


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    num_kv_heads, head_size = rng.choice((1, 2, 3)), 8 * rng.randint(1, 64)
    contexts = [rng.randint(1, 150) for _ in range(4)]
    return Case(
        lens=tuple((rng.choice((1, 1, rng.randint(1, c))), c) for c in contexts),
        heads=(num_kv_heads * rng.randint(1, 8), num_kv_heads),
        head_size=head_size,
        value_head_size=rng.choice((0, 8 * rng.randint(1, head_size // 8))),
        block_size=rng.choice((5, 16, 64)),
        dtype=rng.choice(FLOATS),
        pages_dtype=rng.choice((None, *FLOATS, *FP8)),
        window=rng.choice((0, 0, 30)),
        alibi=rng.random() < 0.3,
        soft_cap=rng.choice((0.0, 0.5, math.pi, 30.0)),
        sinks=rng.random() < 0.5,
        seed=seed,
    )


@pytest.mark.parametrize("case", [random_case(seed) for seed in range(6)], ids=str)
def test_random_mixes_are_right(case: Case) -> None:
    assert_as_exact_as_torch(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [random_case(seed) for seed in range(100, 300)], ids=str)
def test_many_random_mixes_are_right(case: Case) -> None:
    assert_as_exact_as_torch(case)
