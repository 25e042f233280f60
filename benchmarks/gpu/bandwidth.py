"""The machine's own bandwidth, to hold everything else against: several ways, the best counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.measurement import Measurement


def measure_bandwidths(m: Measurement) -> None:
    """Copy (both sides counted), read, and the link to the host each way."""
    _copies(m)
    _reads(m)
    _links(m)
    m.machine.tidy()


def _best(m: Measurement, name: str, num_bytes: int, ways: dict[str, Callable[[], object]]) -> None:
    """A row of each way, ``<name>/<way>``, and one of the best."""
    rates: dict[str, float] = {}

    def measure(way: str) -> None:
        rates[way] = num_bytes / m.machine.watch.seconds(ways[way]) / 1e9
        m.add(f"{name}/{way}", "GB/s", rates[way])

    for way in ways:
        m.attempt(f"{name}/{way}", partial(measure, way))
    best = max(rates, key=lambda way: rates[way])
    m.add(name, "GB/s", rates[best], by=best)


def _copies(m: Measurement) -> None:
    source = torch.randn(m.machine.large_bytes // 4, device=m.machine.device)
    destination = torch.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "copy_": lambda: destination.copy_(source),
        "neg": lambda: torch.neg(source, out=destination),
        "add": lambda: torch.add(source, 1.0, out=destination),
    }
    _best(m, "copy_bandwidth", 2 * source.numel() * 4, ways)


def _reads(m: Measurement) -> None:
    source = torch.randn(m.machine.large_bytes // 4, device=m.machine.device)
    half, other_half = source.chunk(2)
    matrix = source.view(-1, 4096)
    row = torch.randn(4096, device=m.machine.device)
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


def _links(m: Measurement) -> None:
    num_elements = m.machine.large_bytes // 16
    there = torch.randn(num_elements, device=m.machine.device)
    host = m.machine.host_empty((num_elements,), torch.float32)
    ways: dict[str, Callable[[], object]] = {
        "link_out": lambda: host.copy_(there, non_blocking=True),
        "link_in": lambda: there.copy_(host, non_blocking=True),
    }
    for name, run in ways.items():
        seconds = m.machine.watch.seconds(run, in_graph=False)
        m.add(name, "GB/s", num_elements * 4 / seconds / 1e9)
