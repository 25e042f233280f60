"""8-bit pages by the CUDA kernels, emulated or on a GPU: written, read, scaled, and poisoned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import test_fp8_conversions as conversions
import torch
from device_backends import DeviceBackend, chosen_backend, in_place_of_the_cpu
from kernel_cases import (
    FLOATS,
    FP8,
    Case,
    assert_as_exact_as_8_bits,
    assert_as_exact_as_torch,
    assert_same_bits,
    build,
)

from data_plane.kernels.arguments import WriteArguments
from data_plane.kernels.backends.cpu import CpuKernels

E4M3, E5M2 = FP8
HALVES = (torch.float16, torch.bfloat16)
SCALES: tuple[Literal[None, "tensor", "head"], ...] = (None, "tensor", "head")
GROUPS = (1, 4, 5, 7, 16)
HEAD_SIZES = (8, 64, 72, 80, 128, 192, 256)
LENS = ((1, 90), (40, 66), (3, 5), (0, 9), (1, 1))

test_every_code_is_a_number = conversions.test_every_code_is_the_number_that_it_is_to_torch
test_every_code_survives = conversions.test_every_finite_code_survives_the_way_there_and_back
test_numbers_round = conversions.test_numbers_around_every_boundary_round_as_torch_rounds
test_a_scale_divides = conversions.test_a_scale_divides_and_is_not_multiplied_by_its_inverse
test_nan_becomes_one_code = conversions.test_nan_of_either_sign_becomes_the_code_0x7f


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceBackend]:
    with in_place_of_the_cpu(chosen_backend()) as backend:
        monkeypatch.setattr(conversions, "kernels", backend)
        yield backend


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("pages_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scales_of_any_kind_are_right(
    dtype: torch.dtype, pages_dtype: torch.dtype, scales: Literal[None, "tensor", "head"]
) -> None:
    case = Case(lens=((1, 70), (20, 40)), heads=(6, 3), dtype=dtype, pages_dtype=pages_dtype)
    assert_as_exact_as_torch(replace(case, head_size=32, scales=scales))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_any_head_size_is_right(head_size: int) -> None:
    i = HEAD_SIZES.index(head_size)
    case = Case(head_size=head_size, dtype=HALVES[i % 2], pages_dtype=FP8[i // 2 % 2])
    assert_as_exact_as_torch(replace(case, lens=((1, 70), (34, 40)), heads=(2, 2), scales="head"))


@pytest.mark.parametrize("group", GROUPS)
def test_any_group_of_query_heads_is_right(group: int) -> None:
    i = GROUPS.index(group)
    case = Case(heads=(2 * group, 2), dtype=HALVES[i // 2 % 2], pages_dtype=FP8[i % 2])
    assert_as_exact_as_torch(replace(case, lens=((1, 70), (4, 35)), scales="head"))


@pytest.mark.parametrize("block_size", (1, 5, 16, 64))
def test_any_block_size_is_right_with_a_window_and_slopes(block_size: int) -> None:
    i = (1, 5, 16, 64).index(block_size)
    case = Case(
        block_size=block_size, dtype=HALVES[i % 2], pages_dtype=FP8[i // 2], scales="tensor"
    )
    assert_as_exact_as_torch(
        replace(case, lens=((1, 130), (36, 50), (2, 65)), heads=(3, 1), window=31, alibi=True)
    )


@pytest.mark.parametrize("pages_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_to_8_bits_costs_no_more_than_it_costs_torch(
    dtype: torch.dtype, pages_dtype: torch.dtype
) -> None:
    lens = ((1, 100), (36, 50))
    case = Case(lens=lens, dtype=dtype, pages_dtype=pages_dtype, scales="head", head_size=32)
    assert_as_exact_as_8_bits(case)


@pytest.mark.parametrize("seed", range(4))
def test_ragged_batches_are_right_in_any_order_of_warps(backend: DeviceBackend, seed: int) -> None:
    backend.set_seed(seed)
    case = Case(lens=LENS, dtype=HALVES[seed % 2], pages_dtype=FP8[seed // 2], scales="head")
    assert_as_exact_as_torch(replace(case, seed=seed))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("pages_dtype", FP8, ids=str)
def test_pages_hold_the_bits_that_the_cpu_writes(
    pages_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    for scales in SCALES:
        case = Case(dtype=dtype, pages_dtype=pages_dtype, scales=scales, head_size=24)
        batch = build(case)
        large = replace(batch, key=batch.key * 1e3, value=batch.value / 1e3)
        large.write()
        cpu = torch.full_like(batch.pages, torch.nan)
        CpuKernels().reshape_and_cache(replace(large, pages=cpu).to_write())
        assert_same_bits(batch.pages, cpu)


@pytest.mark.parametrize("offset", (1, 2, 4), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_start_anywhere_are_written_as_others(
    backend: DeviceBackend, dtype: torch.dtype, offset: int
) -> None:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype)
        there = room[offset:].view(tensor.shape)
        there.copy_(tensor)
        return there

    for pages_dtype in (E4M3, torch.float32):
        batch = build(Case(dtype=dtype, pages_dtype=pages_dtype, head_size=24))
        for pages, key in (
            (moved(torch.zeros_like(batch.pages)), batch.key),
            (torch.zeros_like(batch.pages), moved(batch.key)),
        ):
            pages.fill_(torch.nan)
            backend.reshape_and_cache(WriteArguments(key, batch.value, pages, batch.slots))
            assert_same_bits(pages, batch.pages)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pages_dtype", FP8, ids=str)
def test_a_sequence_alone_gives_the_bits_of_the_batch(
    backend: DeviceBackend, pages_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    lens = ((1, 140), (40, 40), (2, 70), (1, 16))
    case = Case(lens=lens, heads=(10, 2), head_size=32, pages_dtype=pages_dtype, scales="head")
    batch = build(replace(case, dtype=dtype))
    out, lse = batch.attend()
    starts = batch.query_starts.tolist()
    backend.set_seed(5)
    for s in range(len(lens)):
        alone, alone_lse = batch.only([s]).attend()
        assert_same_bits(alone, out[starts[s] : starts[s + 1]])
        assert_same_bits(alone_lse, lse[starts[s] : starts[s + 1]])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_nan_in_a_visible_key_spoils_just_the_rows_that_see_it(dtype: torch.dtype) -> None:
    for lens in (((10, 10), (1, 3)), ((40, 40), (1, 3))):
        batch = build(Case(lens=lens, heads=(2, 1), dtype=dtype, pages_dtype=E4M3))
        batch.pages.view(torch.uint8)[int(batch.block_tables[0, 0]), 0, 0, 6, 0] = 0x7F
        out, _ = batch.attend()
        assert out[6 : lens[0][0]].isnan().all()
        assert not out[:6].isnan().any() and not out[lens[0][0] :].isnan().any()


@pytest.mark.parametrize("query_len", (1, 40))
def test_queries_of_any_magnitude_are_taken_as_exactly(query_len: int) -> None:
    case = Case(lens=((query_len, 50),), dtype=torch.bfloat16, pages_dtype=E4M3, heads=(4, 1))
    batch = build(case)
    for power in (2.0**-120, 2.0**-20, 2.0**20, 2.0**100):
        query = batch.query * power  # As bf16, the smallest lose bits here.
        out, lse = replace(batch, query=query, scale=batch.scale / power).attend()
        ordinary = replace(batch, query=(query.double() / power).bfloat16())
        expected, expected_lse = ordinary.attend()
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("query_len", (1, 40))
def test_rows_of_other_magnitudes_do_not_matter(query_len: int) -> None:
    """Each row has a scale of its own: one that is wrong here is wrong by a power of two."""
    batch = build(
        Case(lens=((query_len, 50),), dtype=torch.bfloat16, pages_dtype=E5M2, heads=(16, 1))
    )
    expected, _ = batch.attend()
    powers = 2.0 ** (torch.arange(query_len * 16) % 37 - 18).view(query_len, 16, 1)
    large = replace(batch, query=(batch.query * powers).bfloat16())
    for row in range(16):
        token = row * (query_len - 1) // 15
        scaled = replace(large, scale=batch.scale / float(powers[token, row]))
        assert_same_bits(scaled.attend()[0][token, row], expected[token, row])


@pytest.mark.parametrize("query_len", (1, 40))
@pytest.mark.parametrize(
    ("dtype", "power", "key_scale"),
    (
        (torch.float16, 1.0, 3e38),
        (torch.bfloat16, 1.0, 3e38),
        (torch.bfloat16, 2.0**60, 1e30),
        (torch.float32, 1.0, 3e38),
    ),
    ids=str,
)
def test_a_key_of_zeros_has_a_score_of_zero_at_any_scale(
    dtype: torch.dtype, power: float, key_scale: float, query_len: int
) -> None:
    case = Case(lens=((query_len, 50),), dtype=dtype, pages_dtype=E4M3, heads=(4, 1), scales="head")
    batch = build(case)
    batch.key.zero_()
    scales = torch.tensor([key_scale])
    batch = replace(batch, query=batch.query * power, key_scales=scales, scale=1.0)
    batch.write()
    out, lse = batch.attend()
    expected, expected_lse = replace(batch, key_scales=None).attend()
    assert not expected.isnan().any()
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("query_len", (1, 40))
def test_values_may_be_scaled_by_a_number_near_the_smallest(query_len: int) -> None:
    case = Case(lens=((query_len, 50),), dtype=torch.bfloat16, pages_dtype=E4M3, heads=(4, 1))
    batch = build(case)
    batch.value.abs_().add_(1).mul_(100)
    batch.write()
    exact, _ = batch.oracle(torch.float64)
    out, _ = replace(batch, value_scales=torch.tensor([1e-40])).attend()
    torch.testing.assert_close(out.double() * 1e40, exact, rtol=0.02, atol=0)


def test_pages_that_no_16_bytes_fit_are_taken_all_the_same() -> None:
    case = Case(lens=((1, 100), (20, 50)), dtype=torch.bfloat16, pages_dtype=E4M3, scales="head")
    batch = build(case)
    exact, _ = batch.oracle(torch.float64)
    room = torch.zeros(batch.pages.numel() + 8, dtype=torch.uint8).view(E4M3)
    odd = room[8:].view(batch.pages.shape)
    odd.copy_(batch.pages)
    out, _ = replace(batch, pages=odd).attend()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.02)


def random_case(seed: int, longest: int) -> Case:
    rng = random.Random(seed)
    num_kv_heads = rng.choice((1, 2, 3))
    contexts = [rng.randint(1, longest) for _ in range(4)]
    return Case(
        lens=tuple((rng.choice((0, 1, 1, min(c, rng.randint(1, 90)), c)), c) for c in contexts),
        heads=(num_kv_heads * rng.choice(GROUPS), num_kv_heads),
        head_size=rng.choice((*HEAD_SIZES, 8 * rng.randint(1, 32))),
        block_size=rng.choice((1, 5, 16, 64)),
        dtype=rng.choice(FLOATS),
        pages_dtype=rng.choice(FP8),
        scales=rng.choice(SCALES),
        window=rng.choice((0, 0, 1, 30, 64)),
        alibi=rng.random() < 0.3,
        table_dtype=rng.choice((torch.int32, torch.int64)),
        seed=seed,
    )


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [random_case(seed, 300) for seed in range(80)], ids=str)
def test_many_random_batches_are_right(backend: DeviceBackend, case: Case) -> None:
    backend.set_seed(case.seed)
    assert_as_exact_as_torch(case)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("pages_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_pair_of_types_is_right_at_any_head_size(
    dtype: torch.dtype, pages_dtype: torch.dtype, head_size: int
) -> None:
    for scales, group in zip((*SCALES, "head", "tensor"), GROUPS, strict=True):
        case = Case(dtype=dtype, pages_dtype=pages_dtype, head_size=head_size, lens=LENS)
        assert_as_exact_as_torch(replace(case, scales=scales, heads=(2 * group, 2)))
