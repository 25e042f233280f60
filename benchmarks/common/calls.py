"""Times calls by turns, in passes. A figure is the median of the passes' medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BILLIONS_OF_PRODUCTS = "10^9 products/s"


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
    """One measurement. ``amount``: bytes, tokens or products of one call; ``unit``: "GB/s",
    "tokens/s" or BILLIONS_OF_PRODUCTS.

    ``is_warm``: its data may be in a cache; for the others the caches are emptied first.
    """

    name: str
    unit: str
    amount: float
    run: Callable[[], object]
    is_warm: bool = False
    passes: list[Pass] = field(default_factory=list)

    def call(self, empty_caches: Callable[[], object], *, counts: bool) -> None:
        """Time one call. Emptying the caches before it is not timed."""
        if not self.is_warm:
            empty_caches()
        cpu, began = time.process_time(), time.perf_counter()
        self.run()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        if counts:
            self.passes[-1].seconds.append(seconds)
            self.passes[-1].cpu_seconds.append(cpu_seconds)

    def rate(self) -> Spread:
        """Return the rate by wall time, of the median call of each pass."""
        return Spread.of([self._rate(statistics.median(p.seconds)) for p in self.passes])

    def rate_of_core(self) -> Spread:
        """Return the rate per second of CPU time, of the median call of each pass."""
        return Spread.of([self._rate(statistics.median(p.cpu_seconds)) for p in self.passes])

    def best_rate_of_core(self) -> Spread:
        """Return the rate per second of CPU time, of the best call of each pass."""
        return Spread.of([self._rate(min(p.cpu_seconds)) for p in self.passes])

    def quantile(self, quantile: float) -> float:
        """Return a quantile of all calls' rates, by the nearest rank: 0 is the slowest call's."""
        slowest_first = sorted((s for p in self.passes for s in p.seconds), reverse=True)
        at = min(len(slowest_first) - 1, int(quantile * len(slowest_first)))
        return self._rate(slowest_first[at])

    @property
    def num_samples(self) -> int:
        return sum(len(p.seconds) for p in self.passes)

    def _rate(self, seconds: float) -> float:
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
                row.call(empty_caches, counts=round > 0)
