"""Measures the gain of reading shared blocks once for all sequences that share them.

    python -m benchmarks.attention_shared [--sequences N] [--prefix N] [--own N] [--rounds N]
        [--threads N] [--json OUT]

One decode call of sequences whose first ``--prefix`` tokens are in the same blocks, and whose
``--own`` further ones are not. The CPU kernels run it with shared reads, with separate reads
(``apart``, where caches still keep some pages for the next sequence), and without a common block
(``copies``). The three take turns in each round, and before each call other memory is read, so that
no cache holds the pages. Figures are milliseconds: the median by wall time, and the CPU time of all
threads in the call that took the least, which other programs disturb least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.attention_cpu.report import machine
from benchmarks.attention_cpu.rows import (
    BLOCK_SIZE,
    DTYPES,
    GROUPS,
    HEAD_SIZE,
    NUM_KV_HEADS,
    query_dtype_of,
    random_pool,
)
from benchmarks.common.memory import cold_caches
from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backends.cpu import CpuKernels

SIDES = ("shared", "apart", "copies")


@dataclass
class Case:
    """One dtype of pages and one number of query heads per KV head."""

    name: str
    calls: dict[str, Callable[[], torch.Tensor]]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    cpu_seconds: dict[str, list[float]] = field(
        default_factory=lambda: {side: [] for side in SIDES}
    )

    def median_ms(self, side: str) -> float:
        """Return the median wall time."""
        return 1000 * statistics.median(self.seconds[side])

    def cpu_ms(self, side: str) -> float:
        """Return the CPU time of the call that took the least."""
        return 1000 * min(self.cpu_seconds[side])


def cases_of(name: str, num_sequences: int, prefix: int, own: int, num_threads: int) -> list[Case]:
    """Return all groups on the same pages. ``prefix``, ``own``: tokens, in whole blocks."""
    dtype = DTYPES[name]
    num_common, num_own = prefix // BLOCK_SIZE, own // BLOCK_SIZE
    pages = random_pool(num_sequences * (num_common + num_own), dtype)[:, 0]
    copies = torch.randperm(len(pages)).view(num_sequences, num_common + num_own)
    shared = copies.clone()
    shared[:, :num_common] = copies[0, :num_common]
    starts, lens = torch.arange(num_sequences + 1), torch.full((num_sequences,), prefix + own)
    kernels = CpuKernels(num_threads)
    apart = CpuKernels(num_threads, share_reads=False)
    cases = []
    for group in GROUPS:
        query = torch.randn(num_sequences, NUM_KV_HEADS * group, HEAD_SIZE)
        query = query.to(query_dtype_of(dtype))

        def call(
            kernels: CpuKernels, tables: torch.Tensor, query: torch.Tensor = query
        ) -> Callable[[], torch.Tensor]:
            arguments = AttentionArguments(query, pages, tables, starts, lens)
            return lambda: kernels.paged_attention(arguments)

        calls = (call(kernels, shared), call(apart, shared), call(kernels, copies))
        cases.append(Case(f"{name}/g{group}", dict(zip(SIDES, calls, strict=True))))
    return cases


def measure(cases: Sequence[Case], empty_caches: Callable[[], object], num_rounds: int) -> None:
    """Time all sides of all cases by turns; the first round does not count."""
    for round in range(1 + num_rounds):
        for case in cases:
            for side, call in case.calls.items():
                empty_caches()
                cpu_s, began_s = time.process_time(), time.perf_counter()
                call()
                wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
                if round > 0:
                    case.seconds[side].append(wall_s)
                    case.cpu_seconds[side].append(cpu_s)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure decode over a common prefix.")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=4096, help="common tokens")
    parser.add_argument("--own", type=int, default=256, help="further tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/attention_shared.json"))
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    described = machine(arguments.threads, arguments.rounds)
    sizes = (arguments.sequences, arguments.prefix, arguments.own)
    cases = [c for name in ("bf16", "e4m3") for c in cases_of(name, *sizes, arguments.threads)]
    measure(cases, cold_caches(arguments.threads), arguments.rounds)
    print(", ".join(f"{name} {value}" for name, value in described.items()), end="\n\n")
    sides = " | ".join(f"{side}, wall | CPU" for side in SIDES)
    print(f"| ms | {sides} | apart / shared, wall | CPU | copies / shared, wall | CPU |")
    print("|" + "---|" * (2 * len(SIDES) + 5))
    rows = []
    for case in cases:
        figures = [f"{case.median_ms(s):.1f} | {case.cpu_ms(s):.1f}" for s in SIDES]
        for side in SIDES[1:]:
            wall = case.median_ms(side) / case.median_ms("shared")
            figures.append(f"{wall:.2f} | {case.cpu_ms(side) / case.cpu_ms('shared'):.2f}")
        print(f"| {case.name} | {' | '.join(figures)} |")
        rows.append({"name": case.name, "seconds": case.seconds, "cpu_seconds": case.cpu_seconds})
    saved = {"machine": described, "sizes": sizes, "rows": rows}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(saved, indent=2) + "\n")
    print(f"\nsaved to {arguments.json}")


if __name__ == "__main__":
    main()
