"""CPU tensors in pages of 2 MiB where the system has them: random blocks then miss the TLB less."""

from __future__ import annotations

import math
import mmap
from typing import Final

import torch

HUGE_PAGE_BYTES: Final = 2 << 20


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a CPU tensor like ``torch.empty``; a page is allocated when it is first touched."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    # Private: for shared memory, huge pages are a separate setting, which is mostly off.
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return torch.empty(shape, dtype=dtype)
    octets = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -octets.data_ptr() % HUGE_PAGE_BYTES
    return octets[begin : begin + num_bytes].view(dtype).view(shape)
