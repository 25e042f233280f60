"""Measures the speed of memory, and empties the caches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.calls import Calls
from data_plane.memory import huge_pages

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN_CACHE_BYTES = 64 << 20
EVICTING_CACHES = 8  # as many times the last level's bytes are read to empty it
_NEVER = 255  # a byte that does not occur in the memory that is read
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_libc = ctypes.CDLL(None)
_libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_libc.memchr.restype = ctypes.c_void_p


class Memory:
    """Memory to read and copy through the C library, on all threads at once."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        self._source = huge_pages.empty((num_bytes,), torch.uint8).fill_(1)
        self._share = num_bytes // num_threads
        self._threads = ThreadPoolExecutor(num_threads)
        self._offsets = [i * self._share for i in range(num_threads)]

    def read(self) -> None:
        """Searching for a byte that does not occur is the C library's fastest way to read."""
        start = self._source.data_ptr()
        self._on_all(lambda offset: _libc.memchr(start + offset, _NEVER, self._share))

    def read_calls(self) -> Calls:
        return Calls("read_bandwidth", "GB/s", self._share * len(self._offsets), self.read)

    def copy_calls(self) -> Calls:
        target = huge_pages.empty(tuple(self._source.shape), torch.uint8).fill_(2)
        start = self._source.data_ptr()

        def copy(offset: int) -> None:
            ctypes.memmove(target.data_ptr() + offset, start + offset, self._share)

        num_bytes = self._share * len(self._offsets)
        return Calls("memcpy", "GB/s", num_bytes, lambda: self._on_all(copy))

    def _on_all(self, work: Callable[[int], object]) -> None:
        list(self._threads.map(work, self._offsets))


def last_level_cache_bytes(caches: Path = CACHES) -> int:
    """As the kernel reports it; a guess where it does not."""
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    known = [int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS]
    return max(known, default=UNKNOWN_CACHE_BYTES)


def cold_caches(num_threads: int) -> Callable[[], None]:
    """A call that reads so much other memory that no cache holds what it held before."""
    return Memory(EVICTING_CACHES * last_level_cache_bytes(), num_threads).read
