"""How long the device spends in kernels, and how many bytes they have to move: for metrics.

On the CPU every call is timed. On a GPU one call in 16 of each kernel is, by two events on its
stream, which are read once the stream has passed them: nobody waits for the device.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch

from data_plane.execution.counters import ExecutorCounters

_TIMED_CALLS: Final = 16
_MAX_PENDING: Final = 1024


class KernelTimes(Protocol):
    """Times the kernels of one executor."""

    @contextmanager
    def timing(self, kernel: str, num_bytes: int) -> Iterator[None]:
        """What is queued inside on the current stream is a call of ``kernel``, which has to read
        and write ``num_bytes``.
        """
        ...

    def collect(self) -> None:
        """Count the calls that have ended."""
        ...


class HostTimes:
    """For the CPU, where a call has ended when it returns."""

    def __init__(self, counters: ExecutorCounters) -> None:
        self._counters = counters

    @contextmanager
    def timing(self, kernel: str, num_bytes: int) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self._counters.kernel_s[kernel] += time.perf_counter() - begin_s
        self._counters.kernel_bytes[kernel] += num_bytes

    def collect(self) -> None:
        """Nothing is left to count."""


class DeviceTimes:
    """For a GPU."""

    def __init__(self, counters: ExecutorCounters) -> None:
        self._counters = counters
        self._num_calls = Counter[str]()
        self._pending = deque[tuple[str, int, Any, Any]]()

    @contextmanager
    def timing(self, kernel: str, num_bytes: int) -> Iterator[None]:
        self._num_calls[kernel] += 1
        if (
            self._num_calls[kernel] % _TIMED_CALLS != 1
            or len(self._pending) == _MAX_PENDING
            or torch.cuda.is_current_stream_capturing()
        ):
            yield
            return
        begin: Any = _event()
        end: Any = _event()
        begin.record()
        yield
        end.record()
        self._pending.append((kernel, num_bytes, begin, end))

    def collect(self) -> None:
        while self._pending and self._pending[0][3].query():
            kernel, num_bytes, begin, end = self._pending.popleft()
            self._counters.kernel_s[kernel] += begin.elapsed_time(end) / 1000
            self._counters.kernel_bytes[kernel] += num_bytes


def _event() -> Any:
    make: Any = torch.cuda.Event  # untyped
    return make(enable_timing=True)


def kernel_times(device: torch.device, counters: ExecutorCounters) -> KernelTimes:
    """Those of kernels on ``device``."""
    return DeviceTimes(counters) if device.type == "cuda" else HostTimes(counters)
