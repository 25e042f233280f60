"""Times work: on a GPU, medians of replayed graphs with a cold cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

FLUSH_BYTES: Final = 512 << 20  # several times the L2 cache
WARM_UP: Final = 3
PROFILED_RUNS: Final = 5


class Watch(Protocol):
    """Times calls."""

    def seconds(self, work: Callable[[], object], *, in_graph: bool = True) -> float: ...

    def kernel_seconds(self, work: Callable[[], object]) -> float | None: ...

    def host_seconds(self, work: Callable[[], object]) -> float: ...


@dataclass
class Stopwatch:
    """A watch for the GPU. It reads other memory before each run, so that the L2 cache holds
    nothing useful; it does not write, because the timed run would have to write that back.
    """

    min_runs: int = 5
    max_runs: int = 30
    budget_s: float = 0.1  # of timed runs, once there are min_runs
    _flush: torch.Tensor | None = field(default=None, init=False)

    def seconds(self, work: Callable[[], object], *, in_graph: bool = True) -> float:
        """Return the median time of ``work``, captured in a graph to leave out the host's time."""
        if self._flush is None:
            self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        for _ in range(WARM_UP):
            work()
        torch.cuda.synchronize()
        run: Callable[[], object] = work
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            run = graph.replay
        times: list[float] = []
        while len(times) < self.max_runs:
            if len(times) >= self.min_runs and sum(times) > self.budget_s:
                break
            self._flush.amax()
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1000)
        return statistics.median(times)

    def kernel_seconds(self, work: Callable[[], object]) -> float | None:
        """Return the mean time of ``work`` in which some kernel runs, by the profiler: without
        launches and the gaps between kernels, and without the 2 to 4 µs that events add. Kernels
        that begin early overlap, and wait. The cache is warm. None where the profiler sees no
        kernel.
        """
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiled:
            for _ in range(PROFILED_RUNS):
                work()
            torch.cuda.synchronize()
        kernels = [
            (event.time_range.start, event.time_range.end)
            for event in profiled.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return covered(kernels) / 1e6 / PROFILED_RUNS if kernels else None

    def host_seconds(self, work: Callable[[], object]) -> float:
        """Return the mean time that the host needs to queue ``work``, which a graph leaves out."""
        return _host_seconds(work, PROFILED_RUNS)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans of time."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


class Once:
    """A watch that runs the work once, timed by the host's clock: to check that it runs at all."""

    def seconds(self, work: Callable[[], object], *, in_graph: bool = True) -> float:
        del in_graph
        began = time.perf_counter()
        work()
        return max(time.perf_counter() - began, 1e-9)

    def kernel_seconds(self, work: Callable[[], object]) -> float | None:
        del work
        return None

    def host_seconds(self, work: Callable[[], object]) -> float:
        return _host_seconds(work, 1)


def _host_seconds(work: Callable[[], object], runs: int) -> float:
    began = time.perf_counter()
    for _ in range(runs):
        work()
    return (time.perf_counter() - began) / runs
