"""Times calls on a GPU, by events around replayed graphs; the host's time is no part of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Final

import torch

from benchmarks.gpu.case import Settings

FLUSH_BYTES: Final = 512 << 20  # several times the L2 cache
WARM_UP: Final = 3
BUDGET_S: Final = 0.1  # of timed runs, once there are five
Call = Callable[[], object]


def cold_seconds(call: Call, *, in_graph: bool = True) -> float:
    """Return the median time of a call, whose data is in no cache: other memory is read before each
    run; it is not written, since the timed run would have to write that back.

    ``in_graph``: False for a call that waits or allocates, which then includes the host's time.
    """
    flush = torch.ones(1 << 10 if Settings.tiny else FLUSH_BYTES // 4, device="cuda")
    run = _captured(call) if in_graph else call
    for _ in range(1 if Settings.tiny else WARM_UP):
        run()
    times: list[float] = []
    while len(times) < 5 or (len(times) < 30 and sum(times) < BUDGET_S):
        flush.amax()
        times.append(_timed(run))
        if Settings.tiny:
            break
    return statistics.median(times)


def bandwidths() -> tuple[float, float]:
    """Return the bytes a second of a large copy, read and written, and of a read: each in several
    ways, of which the best counts.
    """
    n = 1 << (16 if Settings.tiny else 29)
    a, b = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    rows, column = a.view(-1, 4096), torch.randn(4096, device="cuda")
    copies: Mapping[str, Call] = {
        "copy_": lambda: b.copy_(a),
        "add": lambda: torch.add(a, 1.0, out=b),
    }
    reads: Mapping[str, Call] = {
        "amax": a.amax,
        "row sums": lambda: rows.sum(dim=1),
        "row maxima": lambda: rows.amax(dim=1),
        "matrix times vector": lambda: torch.mv(rows, column),
    }
    copy_s, read_s = (min(cold_seconds(way) for way in ways.values()) for ways in (copies, reads))
    return 8 * n / copy_s, 4 * n / read_s


def _captured(call: Call) -> Call:
    """Return the replay of a graph of a call, which runs once before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _timed(call: Call) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
