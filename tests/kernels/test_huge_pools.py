"""Blocks that lie past 2^31 elements and 2^32 bytes are found.

The pool is virtual memory of which only the end is touched.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import Case, assert_same_bits, build

from data_plane.kernels.backends.cpu import CpuKernels

kernels = CpuKernels()

BLOCK = (2, 1, 16, 64)  # [2, num_kv_heads, block_size, head_size]: 2^11 elements
NUM_BLOCKS = 2**20 + 64  # just past 2^31 elements


@pytest.fixture
def huge() -> torch.Tensor:
    """[num_blocks, num_layers = 1, 2, num_kv_heads, block_size, head_size], bf16; untouched."""
    return torch.empty((NUM_BLOCKS, 1, *BLOCK), dtype=torch.bfloat16)


def test_attention_over_far_blocks_gives_the_bits_of_near_ones(huge: torch.Tensor) -> None:
    near = build(Case(lens=((1, 100), (20, 33)), heads=(4, 1), dtype=torch.bfloat16))
    far_block = NUM_BLOCKS - 1 - near.block_tables
    far = replace(
        near,
        pages=huge[:, 0],
        block_tables=torch.where(near.block_tables < 0, near.block_tables, far_block),
        slots=(NUM_BLOCKS - 1 - near.slots // 16) * 16 + near.slots % 16,
    )
    kernels.reshape_and_cache(far.to_write())
    assert_same_bits(far.attend()[0], near.attend()[0])


def test_far_blocks_are_copied_and_swapped(huge: torch.Tensor) -> None:
    small = torch.randn(3, 1, *BLOCK).to(torch.bfloat16)
    last = NUM_BLOCKS - 1
    kernels.swap_blocks(small, huge, torch.tensor([[2, last]]))
    kernels.copy_blocks(huge, torch.tensor([[last, last - 1]]))
    assert_same_bits(kernels.gather_blocks(huge, torch.tensor([last - 1]))[:, 0], small[2])
    kernels.scatter_blocks(huge, torch.tensor([last]), small[None, 0])
    assert_same_bits(huge[last], small[0])
