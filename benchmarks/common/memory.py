"""Measures the speed of memory, and empties the caches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import kvplane_kernels
import torch

from benchmarks.common.timing import Calls
from data_plane.memory import huge_pages

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN_CACHE_BYTES = 64 << 20
EVICTING_CACHES = 8  # bytes read to empty the last level, as a multiple of its size
RUN_BYTES: Final = 4096
_RUNS_OF_ITEM: Final = 64
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Memory:
    """Memory to read and copy on all threads at once. Reads run on the kernels' threads."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        num_bytes = num_bytes // RUN_BYTES * RUN_BYTES
        self._source = huge_pages.empty((num_bytes,), torch.uint8).fill_(1)
        self._num_threads = num_threads
        self._in_order = torch.arange(0, num_bytes, RUN_BYTES)
        self._share = num_bytes // num_threads

    def read(self) -> None:
        """Read everything in address order."""
        read_runs(self._source, self._in_order, RUN_BYTES, self._num_threads)

    def read_calls(self) -> Calls:
        return Calls("read_bandwidth", "GB/s", self._source.nbytes, self.read)

    def copy_calls(self) -> Calls:
        target = huge_pages.empty(tuple(self._source.shape), torch.uint8).fill_(2)
        start = self._source.data_ptr()
        threads = ThreadPoolExecutor(self._num_threads)
        offsets = [i * self._share for i in range(self._num_threads)]

        def copy(offset: int) -> None:
            ctypes.memmove(target.data_ptr() + offset, start + offset, self._share)

        num_bytes = self._share * len(offsets)
        return Calls("memcpy", "GB/s", num_bytes, lambda: list(threads.map(copy, offsets)))


def read_runs(memory: torch.Tensor, offsets: torch.Tensor, run_bytes: int, num_threads: int) -> int:
    """Read runs of memory in this order, 64 of them by one thread. offsets: int64 [num_runs], bytes
    from the memory's first. Return the exclusive or of all words of 8 bytes.
    """
    return kvplane_kernels.read_runs(
        memory=memory.data_ptr(),
        offsets=offsets.data_ptr(),
        num_runs=offsets.shape[0],
        run_bytes=run_bytes,
        runs_of_item=_RUNS_OF_ITEM,
        num_threads=num_threads,
    )


def page_offsets(pool: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Return the addresses that a decode step reads in a pool [num_blocks, num_layers, 2,
    num_kv_heads, block_size, head_size], in its order: layer by layer, two blocks at a time, of
    each KV head the keys and then the values. int64 [num_runs], bytes.
    """
    _, num_layers, _, num_kv_heads, _, _ = pool.shape
    blocks = tables.reshape(1, -1, 1, 1, 2)  # [layer, pair, KV head, K or V, block of the pair]
    layers = torch.arange(num_layers).view(-1, 1, 1, 1, 1)
    heads = torch.arange(num_kv_heads).view(1, 1, -1, 1, 1)
    kinds = torch.arange(2).view(1, 1, 1, -1, 1)
    of_block, of_layer, of_kind, of_head, _, _ = pool.stride()
    elements = blocks * of_block + layers * of_layer + kinds * of_kind + heads * of_head
    return (elements * pool.element_size()).flatten().contiguous()


def last_level_cache_bytes(caches: Path = CACHES) -> int:
    """Return the size that the kernel reports; a guess where it reports none."""
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    known = [int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS]
    return max(known, default=UNKNOWN_CACHE_BYTES)


def cold_caches(num_threads: int) -> Callable[[], None]:
    """Return a call that reads other memory until no cache holds what it held before."""
    return Memory(EVICTING_CACHES * last_level_cache_bytes(), num_threads).read
