"""Times calls by turns, in passes, and returns their statistics."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


def quantile(values: Sequence[float], q: float) -> float:
    """Return a quantile by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


@dataclass
class Calls:
    """One measurement. ``amount``: the bytes, tokens or products of one call; ``unit``: "GB/s",
    "tokens/s" or "10^9 products/s".
    """

    name: str
    unit: str
    amount: float
    run: Callable[[], object]
    passes: list[list[float]] = field(default_factory=list)
    """The wall time of each call, in seconds."""
    cpu_seconds: list[float] = field(default_factory=list)
    """The CPU time of each call, of all cores."""

    @property
    def seconds(self) -> list[float]:
        """The wall time of every call."""
        return [seconds for of_pass in self.passes for seconds in of_pass]

    @property
    def least_cpu_s(self) -> float:
        """The CPU time of the call that took the least, which other programs disturb least."""
        return min(self.cpu_seconds)

    def rate(self) -> float:
        """Return the rate by wall time: the median of the passes' medians."""
        amount = self.amount / (1 if self.unit == "tokens/s" else 1e9)
        return statistics.median(amount / statistics.median(each) for each in self.passes)


def call_in_rounds(
    rows: Sequence[Calls],
    empty_caches: Callable[[], object],
    *,
    num_passes: int,
    num_rounds: int,
) -> None:
    """Time all rows by turns, so that noise from elsewhere affects them alike. The caches are
    emptied before each call.

    Each pass begins with a round that does not count.
    """
    for _ in range(num_passes):
        for row in rows:
            row.passes.append([])
        for round in range(1 + num_rounds):
            for row in rows:
                empty_caches()
                cpu, began = time.process_time(), time.perf_counter()
                row.run()
                seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
                if round > 0:
                    row.passes[-1].append(seconds)
                    row.cpu_seconds.append(cpu_seconds)


def drop_leftovers() -> None:
    """Collect garbage, and return freed memory to the kernel, so that what earlier cases left does
    not count in the next one. glibc would return 300 MB at once, which takes 25 ms, in whichever
    call frees the last of it.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
