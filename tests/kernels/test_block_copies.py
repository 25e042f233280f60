"""Whole blocks are copied in order, between pools, and to and from the canonical order."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import FLOATS, FP8, assert_same_bits

from data_plane.kernels.backends.cpu import CpuKernels

kernels = CpuKernels()

SHAPE = (3, 2, 2, 4, 8)  # [num_layers, 2, num_kv_heads, block_size, head_size]


def new_pool(num_blocks: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_blocks, *SHAPE).to(dtype)


def random_pairs(num_pairs: int, num_from: int, num_to: int) -> torch.Tensor:
    return torch.stack(
        (torch.randint(num_from, (num_pairs,)), torch.randint(num_to, (num_pairs,))), dim=1
    )


@pytest.mark.parametrize("dtype", FLOATS + FP8, ids=str)
def test_copies_inside_a_pool_are_done_in_order(dtype: torch.dtype) -> None:
    pool = new_pool(10, dtype)
    expected = pool.clone()
    pairs = random_pairs(256, 10, 10)
    for source, destination in pairs.tolist():
        expected[destination] = expected[source].clone()
    kernels.copy_blocks(pool, pairs)
    assert_same_bits(pool, expected)


def test_a_later_pair_reads_what_an_earlier_one_wrote() -> None:
    pool = new_pool(4)
    first = pool[0].clone()
    kernels.copy_blocks(pool, torch.tensor([[0, 1], [1, 2], [2, 3]]))
    assert_same_bits(pool[3], first)


def test_a_block_copied_to_itself_stays() -> None:
    pool = new_pool(4)
    expected = pool.clone()
    kernels.copy_blocks(pool, torch.tensor([[2, 2]]))
    assert_same_bits(pool, expected)


@pytest.mark.parametrize("dtype", (torch.float32, *FP8), ids=str)
def test_swaps_move_blocks_between_pools_of_other_sizes(dtype: torch.dtype) -> None:
    device, host = new_pool(6, dtype), new_pool(20, dtype)
    expected = host.clone()
    pairs = torch.tensor([[0, 19], [5, 0], [3, 7], [3, 8]])
    for source, destination in pairs.tolist():
        expected[destination] = device[source]
    before = device.clone()
    kernels.swap_blocks(device, host, pairs)
    assert_same_bits(host, expected)
    assert_same_bits(device, before)


def test_a_swap_there_and_back_gives_the_same_bits() -> None:
    device, host = new_pool(8, torch.bfloat16), new_pool(8, torch.bfloat16)
    before = device.clone()
    out = torch.stack((torch.arange(8), torch.randperm(8)), dim=1)
    kernels.swap_blocks(device, host, out)
    device.fill_(torch.nan)
    kernels.swap_blocks(host, device, out.flip(1))
    assert_same_bits(device, before)


@pytest.mark.parametrize("dtype", FLOATS + FP8, ids=str)
def test_gather_is_layer_major_and_scatter_its_inverse(dtype: torch.dtype) -> None:
    pool = new_pool(9, dtype)
    ids = torch.tensor([7, 0, 3, 7])
    blocks = kernels.gather_blocks(pool, ids)
    assert_same_bits(blocks, pool[ids].transpose(0, 1))
    other = torch.full_like(pool, torch.nan)
    kernels.scatter_blocks(other, ids, blocks)
    assert_same_bits(other[ids], pool[ids])
    assert other[[1, 2, 4, 5, 6, 8]].isnan().all()


def test_pools_may_have_room_between_blocks() -> None:
    wide = torch.full((12, *SHAPE), torch.nan)
    pool = wide[::2]
    pool.copy_(new_pool(6))
    expected = pool.clone()
    expected[4] = expected[1]
    kernels.copy_blocks(pool, torch.tensor([[1, 4]]))
    kernels.scatter_blocks(pool, torch.tensor([4]), kernels.gather_blocks(pool, torch.tensor([1])))
    assert_same_bits(pool, expected)
    assert wide[1::2].isnan().all()


def test_no_pairs_and_no_ids_do_nothing() -> None:
    pool = new_pool(2)
    expected = pool.clone()
    kernels.copy_blocks(pool, torch.empty((0, 2), dtype=torch.int64))
    kernels.swap_blocks(new_pool(1), pool, torch.empty((0, 2), dtype=torch.int64))
    blocks = kernels.gather_blocks(pool, torch.empty(0, dtype=torch.int64))
    kernels.scatter_blocks(pool, torch.empty(0, dtype=torch.int64), blocks)
    assert blocks.shape == (3, 0, 2, 2, 4, 8)
    assert_same_bits(pool, expected)


def test_an_empty_pool_takes_no_ids() -> None:
    pool = new_pool(0)
    assert kernels.gather_blocks(pool, torch.empty(0, dtype=torch.int64)).numel() == 0
