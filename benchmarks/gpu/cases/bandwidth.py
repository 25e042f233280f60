"""Measures the machine's own bandwidth, the base of all comparisons, in several ways; the best
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from benchmarks.gpu.device.machine import Machine
from benchmarks.gpu.measurement import Measurement

MEMORY_SHARE: Final = 0.25  # of free memory, for one buffer; copies need two
LINK_SHARE: Final = 0.25  # of the buffer size for bandwidths inside the GPU
_ROW: Final = 4096  # elements; buffers hold an even number of rows


def measure_bandwidths(m: Measurement) -> None:
    """Measure copies (reads and writes both count), reads, and the link to the host each way.

    A measurement that fails is left out, and the run continues.
    """
    for name, measure in (
        ("copy_bandwidth", _copies),
        ("read_bandwidth", _reads),
        ("link_out", partial(_link, name="link_out")),
        ("link_in", partial(_link, name="link_in")),
    ):
        m.attempt(name, partial(measure, m))


def _num_floats(m: Machine, share: float = 1.0) -> int:
    """Return the size of a buffer: what ``m`` asks for, or less if there is no room for it."""
    wanted = min(share * m.large_bytes, MEMORY_SHARE * m.free_bytes())
    num_rows = int(wanted) // (4 * _ROW) // 2 * 2
    if num_rows == 0:
        raise MemoryError(f"{m.free_bytes()} free bytes are too little")
    return num_rows * _ROW


def _best(m: Measurement, name: str, num_bytes: int, ways: dict[str, Callable[[], object]]) -> None:
    """Add a row for each way, ``<name>/<way>``, and one for the best."""
    rates: dict[str, float] = {}

    def measure(way: str) -> None:
        rates[way] = num_bytes / m.machine.watch.seconds(ways[way]) / 1e9
        m.add(f"{name}/{way}", "GB/s", rates[way])

    for way in ways:
        m.attempt(f"{name}/{way}", partial(measure, way))
    if not rates:
        m.leave_out(name, "no way to measure it worked")
        return
    best = max(rates, key=lambda way: rates[way])
    m.add(name, "GB/s", rates[best], by=best)


def _copies(m: Measurement) -> None:
    source = torch.randn(_num_floats(m.machine), device=m.machine.device)
    destination = torch.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "copy_": lambda: destination.copy_(source),
        "neg": lambda: torch.neg(source, out=destination),
        "add": lambda: torch.add(source, 1.0, out=destination),
    }
    _best(m, "copy_bandwidth", 2 * source.numel() * 4, ways)


def _reads(m: Measurement) -> None:
    source = torch.randn(_num_floats(m.machine), device=m.machine.device)
    half, other_half = source.chunk(2)
    matrix = source.view(-1, _ROW)
    row = torch.randn(_ROW, device=m.machine.device)
    ways: dict[str, Callable[[], object]] = {
        "sum": source.sum,
        "amax": source.amax,
        "amax_of_bf16": lambda: source.view(torch.bfloat16).amax(),
        "row_sums": lambda: matrix.sum(dim=1),
        "row_maxima": lambda: matrix.amax(dim=1),
        "dot": lambda: torch.dot(half, other_half),
        "matrix_times_vector": lambda: torch.mv(matrix, row),
    }
    _best(m, "read_bandwidth", source.numel() * 4, ways)


def _link(m: Measurement, name: str) -> None:
    there = torch.randn(_num_floats(m.machine, LINK_SHARE), device=m.machine.device)
    host = m.machine.host_empty(tuple(there.shape), there.dtype)
    target, source = (host, there) if name == "link_out" else (there, host)

    def run() -> None:
        target.copy_(source, non_blocking=True)

    seconds = m.machine.watch.seconds(run, in_graph=False)
    m.add(name, "GB/s", there.nbytes / seconds / 1e9)
