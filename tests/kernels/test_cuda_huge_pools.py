"""The device's kernels find blocks that lie past 2^31 elements and 2^32 bytes.

On the emulator the pool is virtual memory of which only the end is touched; a GPU holds all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from device_backends import DeviceBackend, chosen_backend, in_place_of_the_cpu
from kernel_cases import Case, assert_same_bits, build

BLOCK = (2, 1, 16, 64)  # [2, num_kv_heads, block_size, head_size]: 2^11 elements
NUM_BLOCKS = 2**20 + 64  # just past 2^31 elements


@pytest.fixture(scope="module")
def backend() -> Iterator[DeviceBackend]:
    with in_place_of_the_cpu(chosen_backend()) as backend:
        yield backend


def huge(backend: DeviceBackend, dtype: torch.dtype) -> torch.Tensor:
    """[num_blocks, num_layers = 1, 2, num_kv_heads, block_size, head_size]; untouched."""
    return torch.empty((NUM_BLOCKS, 1, *BLOCK), dtype=dtype, device=backend.device)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_attention_over_far_blocks_gives_the_bits_of_near_ones(
    backend: DeviceBackend, dtype: torch.dtype
) -> None:
    near = build(Case(lens=((1, 100), (20, 33), (40, 50)), heads=(4, 1), dtype=dtype))
    far_block = NUM_BLOCKS - 1 - near.block_tables
    far = replace(
        near,
        block_tables=torch.where(near.block_tables < 0, near.block_tables, far_block),
        slots=(NUM_BLOCKS - 1 - near.slots // 16) * 16 + near.slots % 16,
    )
    # Where the pages are, which are too large to be moved for each call.
    there = {
        f.name: value.to(backend.device)
        for f in fields(far)
        if isinstance(value := getattr(far, f.name), torch.Tensor)
    }
    far = replace(far, **there | {"pages": huge(backend, dtype)[:, 0]})
    backend.reshape_and_cache(far.to_write())
    assert_same_bits(far.attend()[0], near.attend()[0])


def test_far_blocks_are_copied_and_swapped(backend: DeviceBackend) -> None:
    pool = huge(backend, torch.bfloat16)
    small = torch.randn(3, 1, *BLOCK).to(torch.bfloat16)
    last = NUM_BLOCKS - 1
    backend.swap_blocks(small, pool, torch.tensor([[2, last]]))
    backend.copy_blocks(pool, torch.tensor([[last, last - 1]]))
    assert_same_bits(backend.gather_blocks(pool, torch.tensor([last - 1]))[:, 0], small[2])
    backend.scatter_blocks(pool, torch.tensor([last]), small[None, 0])
    assert_same_bits(pool[last].cpu(), small[0])
