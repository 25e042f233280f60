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
class Spread:
    """The median, the lowest and the highest of one figure over all passes."""

    middle: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        return cls(statistics.median(figures), min(figures), max(figures))


@dataclass
class Pass:
    """The seconds of each call: wall time, and CPU time of all cores."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


@dataclass
class Calls:
    """One measurement. ``amount``: the bytes, tokens or products of one call; ``unit``: "GB/s",
    "tokens/s" or "10^9 products/s". ``before``: what is done before each call, untimed; None to
    empty the caches.
    """

    name: str
    unit: str
    amount: float
    run: Callable[[], object]
    before: Callable[[], object] | None = None
    passes: list[Pass] = field(default_factory=list)

    def call(self, empty_caches: Callable[[], object]) -> tuple[float, float]:
        """Make one call; return its wall time and its CPU time."""
        (self.before or empty_caches)()
        cpu, began = time.process_time(), time.perf_counter()
        self.run()
        return time.perf_counter() - began, time.process_time() - cpu

    @property
    def seconds(self) -> list[float]:
        """The wall time of every call."""
        return [s for p in self.passes for s in p.seconds]

    @property
    def least_cpu_s(self) -> float:
        """The CPU time of the call that took the least, which other programs disturb least."""
        return min(s for p in self.passes for s in p.cpu_seconds)

    def rate(self) -> Spread:
        """Return the rate by wall time, of the median call of each pass."""
        return Spread.of([self.rate_of(statistics.median(p.seconds)) for p in self.passes])

    def rate_of(self, seconds: float) -> float:
        """Return the rate of a call that takes so long."""
        return self.amount / seconds / (1 if self.unit == "tokens/s" else 1e9)


def call_in_rounds(
    rows: Sequence[Calls],
    empty_caches: Callable[[], object],
    *,
    num_passes: int,
    num_rounds: int,
) -> None:
    """Time all rows by turns, so that noise from elsewhere affects them alike.

    Each pass begins with a round that does not count.
    """
    for _ in range(num_passes):
        for row in rows:
            row.passes.append(Pass())
        for round in range(1 + num_rounds):
            for row in rows:
                seconds, cpu_seconds = row.call(empty_caches)
                if round > 0:
                    row.passes[-1].seconds.append(seconds)
                    row.passes[-1].cpu_seconds.append(cpu_seconds)


def drop_leftovers() -> None:
    """Collect garbage, and return freed memory to the kernel, so that what earlier cases left does
    not count in the next one. glibc would return 300 MB at once, which takes 25 ms, in whichever
    call frees the last of it.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
