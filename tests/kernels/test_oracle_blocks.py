"""Whole blocks are copied in order, between pools, and to and from the canonical order, wherever
they lie.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from backends import ONE_OF_EACH, DeviceBackend
from kernel_cases import FLOATS, FP8, Case, assert_same_bits, build

from data_plane.kernels.backend import Kernels

pytestmark = pytest.mark.parametrize("backend", ONE_OF_EACH, indirect=True)

SHAPE = (3, 2, 2, 4, 8)  # [num_layers, 2, num_kv_heads, block_size, head_size]


def new_pool(num_blocks: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_blocks, *SHAPE).to(dtype)


def random_pairs(num_pairs: int, num_from: int, num_to: int) -> torch.Tensor:
    return torch.stack(
        (torch.randint(num_from, (num_pairs,)), torch.randint(num_to, (num_pairs,))), dim=1
    )


@pytest.mark.parametrize("dtype", FLOATS + FP8, ids=str)
def test_copies_inside_a_pool_are_done_in_order(backend: Kernels, dtype: torch.dtype) -> None:
    pool = new_pool(10, dtype)
    expected = pool.clone()
    pairs = random_pairs(256, 10, 10)  # also of a block with itself, and of blocks just written
    for source, destination in pairs.tolist():
        expected[destination] = expected[source].clone()
    backend.copy_blocks(pool, pairs)
    assert_same_bits(pool, expected)


@pytest.mark.parametrize("dtype", (torch.float32, *FP8), ids=str)
def test_swaps_move_blocks_between_pools_of_other_sizes(
    backend: Kernels, dtype: torch.dtype
) -> None:
    device, host = new_pool(6, dtype), new_pool(20, dtype)
    expected = host.clone()
    pairs = torch.tensor([[0, 19], [5, 0], [3, 7], [3, 8]])
    for source, destination in pairs.tolist():
        expected[destination] = device[source]
    before = device.clone()
    backend.swap_blocks(device, host, pairs)
    assert_same_bits(host, expected)
    assert_same_bits(device, before)


@pytest.mark.parametrize("dtype", FLOATS + FP8, ids=str)
def test_gather_is_layer_major_and_scatter_its_inverse(
    backend: Kernels, dtype: torch.dtype
) -> None:
    pool = new_pool(9, dtype)
    ids = torch.tensor([7, 0, 3, 7])
    blocks = backend.gather_blocks(pool, ids)
    assert_same_bits(blocks, pool[ids].transpose(0, 1))
    other = torch.full_like(pool, torch.nan)
    backend.scatter_blocks(other, ids, blocks)
    assert_same_bits(other[ids], pool[ids])
    assert other[[1, 2, 4, 5, 6, 8]].isnan().all()


def test_pools_may_have_room_between_blocks(backend: Kernels) -> None:
    wide = torch.full((12, *SHAPE), torch.nan)
    pool = wide[::2]
    pool.copy_(new_pool(6))
    expected = pool.clone()
    expected[4] = expected[1]
    backend.copy_blocks(pool, torch.tensor([[1, 4]]))
    backend.scatter_blocks(pool, torch.tensor([4]), backend.gather_blocks(pool, torch.tensor([1])))
    assert_same_bits(pool, expected)
    assert wide[1::2].isnan().all()


def test_no_pairs_and_no_ids_do_nothing(backend: Kernels) -> None:
    pool = new_pool(2)
    expected = pool.clone()
    backend.copy_blocks(pool, torch.empty((0, 2), dtype=torch.int64))
    backend.swap_blocks(new_pool(1), pool, torch.empty((0, 2), dtype=torch.int64))
    blocks = backend.gather_blocks(pool, torch.empty(0, dtype=torch.int64))
    backend.scatter_blocks(pool, torch.empty(0, dtype=torch.int64), blocks)
    assert blocks.shape == (3, 0, 2, 2, 4, 8)
    assert_same_bits(pool, expected)


def test_an_empty_pool_takes_no_ids(backend: Kernels) -> None:
    pool = new_pool(0)
    assert backend.gather_blocks(pool, torch.empty(0, dtype=torch.int64)).numel() == 0


def test_many_scattered_blocks_are_copied(backend: Kernels) -> None:
    """On a device, by more than one launch. ``test_swap_paths.py`` gathers and scatters as many."""
    pool = torch.randn(500, 1, 2, 1, 3, 8).bfloat16()
    ids = torch.randperm(500)
    pairs = torch.stack((ids[:230], ids[230:460]), dim=1)
    expected = pool.clone()
    expected[pairs[:, 1]] = pool[pairs[:, 0]]
    backend.copy_blocks(pool, pairs)
    assert_same_bits(pool, expected)


def test_of_equal_ids_the_last_block_stays(backend: Kernels) -> None:
    pool = torch.zeros(3, 2, 2, 1, 4, 8)
    blocks = torch.randn(2, 3, 2, 1, 4, 8)
    backend.scatter_blocks(pool, torch.tensor([1, 1, 1]), blocks)
    assert_same_bits(pool[1], blocks[:, 2])


BLOCK = (2, 1, 16, 64)  # [2, num_kv_heads, block_size, head_size]: 2^11 elements
NUM_BLOCKS = 2**20 + 64  # just past 2^31 elements and 2^32 bytes


def huge(backend: Kernels, dtype: torch.dtype) -> torch.Tensor:
    """[num_blocks, num_layers = 1, 2, num_kv_heads, block_size, head_size]. On the CPU and on the
    emulator it is virtual memory of which only the end is touched; a GPU holds all of it.
    """
    device = backend.torch_device if isinstance(backend, DeviceBackend) else None
    return torch.empty((NUM_BLOCKS, 1, *BLOCK), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_attention_over_far_blocks_gives_the_bits_of_near_ones(
    backend: Kernels, dtype: torch.dtype
) -> None:
    near = build(Case(lens=((1, 100), (20, 33), (40, 50)), heads=(4, 1), dtype=dtype))
    far_block = NUM_BLOCKS - 1 - near.block_tables
    far = replace(
        near,
        block_tables=torch.where(near.block_tables < 0, near.block_tables, far_block),
        slots=(NUM_BLOCKS - 1 - near.slots // 16) * 16 + near.slots % 16,
    )
    pages = huge(backend, dtype)[:, 0]
    # All where the pages are, which are too large to be moved for each call.
    there = {
        f.name: value.to(pages.device)
        for f in fields(far)
        if isinstance(value := getattr(far, f.name), torch.Tensor)
    }
    far = replace(far, **there | {"pages": pages})
    backend.reshape_and_cache(far.to_write())
    assert_same_bits(far.attend()[0], near.attend()[0])


def test_far_blocks_are_copied_and_swapped(backend: Kernels) -> None:
    pool = huge(backend, torch.bfloat16)
    small = torch.randn(3, 1, *BLOCK).to(torch.bfloat16)
    last = NUM_BLOCKS - 1
    backend.swap_blocks(small, pool, torch.tensor([[2, last]]))
    backend.copy_blocks(pool, torch.tensor([[last, last - 1]]))
    assert_same_bits(backend.gather_blocks(pool, torch.tensor([last - 1]))[:, 0], small[2])
    backend.scatter_blocks(pool, torch.tensor([last]), small[None, 0])
    assert_same_bits(pool[last].cpu(), small[0])
