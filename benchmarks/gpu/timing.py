"""How long work takes on the GPU: medians of replayed graphs, the cache cold."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final

import torch

FLUSH_BYTES: Final = 256 << 20  # several times the L2 cache
WARM_UP: Final = 3


class Stopwatch:
    """Times calls. Between two of them the L2 cache is filled with other bytes."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def seconds(self, work: Callable[[], object], *, in_graph: bool = True) -> float:
        """The median time of ``work``, captured in a graph so that the host's share is left out."""
        for _ in range(WARM_UP):
            work()
        torch.cuda.synchronize()
        run: Callable[[], object] = work
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            run = graph.replay
        times = []
        for _ in range(self._num_runs):
            self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1000)
        return statistics.median(times)
