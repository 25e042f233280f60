"""New keys and values land in their slots, bit for bit, and nowhere else."""

from __future__ import annotations

import oracle
import pytest
import torch
from kernel_cases import FLOATS, FP8, assert_same_bits

from data_plane.kernels.arguments import WriteArguments
from data_plane.kernels.backends.cpu import CpuKernels

kernels = CpuKernels()

NUM_TOKENS, NUM_HEADS = 42, 3


def new_pages(num_blocks: int, block_size: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((num_blocks, 2, NUM_HEADS, block_size, head_size), torch.nan, dtype=dtype)


def check(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    expected = pages.clone()
    oracle.reshape_and_cache(key, value, expected, slots, key_scales, value_scales)
    kernels.reshape_and_cache(WriteArguments(key, value, pages, slots, key_scales, value_scales))
    assert_same_bits(pages, expected)


@pytest.mark.parametrize("block_size", (1, 5, 8, 16, 32, 256))
@pytest.mark.parametrize("head_size", (8, 64, 80, 256))
def test_tokens_land_in_their_slots(block_size: int, head_size: int) -> None:
    pages = new_pages(64, block_size, head_size, torch.float32)
    slots = torch.randperm(64 * block_size)[:NUM_TOKENS]
    key, value = torch.randn(2, NUM_TOKENS, NUM_HEADS, head_size).unbind()
    check(key, value, pages, slots)


@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_conversion_rounds_as_torch_does(source: torch.dtype, to: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (2, 4096, NUM_HEADS, 16), generator=rng).int()
    numbers = bits.view(torch.float32).nan_to_num(nan=0.0)  # Of all magnitudes, subnormals too.
    ordinary = torch.randn(numbers.shape, generator=rng) * 100
    ties = [1 + odd * 2**-bits for bits in (8, 11) for odd in (1, 3)]
    tiny = [0.0, -0.0, 2**-24, 2**-25, 1.5 * 2**-25, 2**-14, 1e-45]
    large = [65504.0, 65519.99, 65520.0, 3e38, torch.inf, -torch.inf]
    edges = torch.tensor(ties + tiny + large)
    numbers.flatten()[: len(edges)] = edges
    for values in (numbers, ordinary):
        key, value = values.to(source).unbind()
        check(key, value, new_pages(512, 8, 16, to), torch.arange(4096))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_every_number_of_16_bits_survives_the_way_to_fp32(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).nan_to_num(nan=1.0)
    numbers = numbers.view(512, 1, 128)
    pages = torch.zeros((512, 2, 1, 1, 128))
    kernels.reshape_and_cache(WriteArguments(numbers, numbers, pages, torch.arange(512)))
    assert_same_bits(pages[:, 0, 0], numbers.float())
    back = torch.zeros((512, 2, 1, 1, 128), dtype=dtype)
    wide = WriteArguments(numbers.float(), numbers.float(), back, torch.arange(512))
    kernels.reshape_and_cache(wide)
    assert_same_bits(back[:, 1, 0], numbers)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_nan_stays_nan(dtype: torch.dtype) -> None:
    key = torch.full((1, NUM_HEADS, 8), torch.nan)
    pages = torch.zeros((1, 2, NUM_HEADS, 1, 8), dtype=dtype)
    kernels.reshape_and_cache(WriteArguments(key, -key, pages, torch.tensor([0])))
    assert pages.isnan().all()


def test_negative_slots_are_skipped() -> None:
    key, value = torch.randn(2, 4, NUM_HEADS, 8).unbind()
    check(key, value, new_pages(2, 4, 8, torch.float32), torch.tensor([3, -1, 0, -(2**63)]))


def test_the_last_of_equal_slots_stays() -> None:
    key, value = torch.randn(2, 3, NUM_HEADS, 8).unbind()
    check(key, value, new_pages(2, 4, 8, torch.float32), torch.tensor([5, 5, 5]))


def test_strided_tensors_are_read_and_written_in_place() -> None:
    key, value = torch.randn(NUM_TOKENS, 2, NUM_HEADS, 64).unbind(1)
    slots = torch.randperm(64)[:NUM_TOKENS]
    pool = torch.full((4, 3, 2, NUM_HEADS, 16, 64), torch.nan)
    check(key, value, pool[:, 1], slots)
    assert pool[:, 0].isnan().all() and pool[:, 2].isnan().all()
    tokens_first = torch.full((4, 2, 16, NUM_HEADS, 64), torch.nan).transpose(2, 3)
    check(key, value, tokens_first, slots)
    heads_first = torch.randn(2, NUM_HEADS, NUM_TOKENS, 64).transpose(1, 2)
    check(heads_first[0], heads_first[1], pool[:, 2], slots.repeat_interleave(2)[::2])


@pytest.mark.parametrize("to", FP8, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_each_head_of_fp8_pages_has_scales_of_its_own(source: torch.dtype, to: torch.dtype) -> None:
    per_head = torch.tensor([0.01, 3.0, 700.0])
    for scales in (
        (None, None),
        (torch.tensor([0.3]), None),
        (None, per_head),
        (per_head, per_head.flip(0)),
        (torch.tensor([0.3]), per_head.repeat_interleave(3)[::3]),
    ):
        for head_size, block_size in ((8, 1), (72, 5), (256, 16)):
            key, value = torch.randn(2, NUM_TOKENS, NUM_HEADS, head_size).to(source).unbind()
            slots = torch.randperm(64)[:NUM_TOKENS]
            check(key, value, new_pages(64, block_size, head_size, to), slots, *scales)


def test_fp8_pages_inside_a_pool_are_written_from_strided_keys_on_every_thread() -> None:
    qkv = torch.randn(700, 4, NUM_HEADS, 256)
    pool = torch.full((44, 2, 2, NUM_HEADS, 16, 256), torch.nan).to(torch.float8_e4m3fn)
    slots = torch.randperm(44 * 16)[:700]
    slots[5::50] = -1
    check(qkv[:, 1], qkv[:, 3], pool[:, 1], slots, torch.tensor([0.02]), torch.tensor([0.05]))
    assert pool[:, 0].isnan().all()


def test_no_tokens_write_nothing() -> None:
    key = torch.empty((0, NUM_HEADS, 8))
    check(key, key, new_pages(2, 4, 8, torch.float32), torch.empty(0, dtype=torch.int64))
