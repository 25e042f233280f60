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
        kvplane_kernels.read_runs(
            memory=self._source.data_ptr(),
            offsets=self._in_order.data_ptr(),
            num_runs=len(self._in_order),
            run_bytes=RUN_BYTES,
            runs_of_item=_RUNS_OF_ITEM,
            num_threads=self._num_threads,
        )

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


def last_level_cache_bytes(caches: Path = CACHES) -> int:
    """Return the size that the kernel reports; a guess where it reports none."""
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    known = [int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS]
    return max(known, default=UNKNOWN_CACHE_BYTES)


def cold_caches(num_threads: int) -> Callable[[], None]:
    """Return a call that reads other memory until no cache holds what it held before."""
    return Memory(EVICTING_CACHES * last_level_cache_bytes(), num_threads).read
