"""Measures whether the CPU kernels' threads are all at work at once after the caller slept.

    python -m benchmarks.attention_idle [--rounds N] [--threads N] [--json OUT]

One decode call, over pages in random order that no cache holds, after the caller slept for 0, 0.2,
5 and 20 ms; the four take turns in each round, so that noise from elsewhere affects them alike. A
thread that wakes up on the caller's CPU halves the rate. The figures are of the fastest tenth of
the calls (p10), which other programs disturb least, and the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks.attention_cpu.report import machine
from benchmarks.attention_cpu.rows import (
    BATCH,
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_KV_HEADS,
    random_pool,
)
from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backends.cpu import CpuKernels

IDLE_MS: Final = (0.0, 0.2, 5.0, 20.0)
GROUP, CONTEXT_TOKENS = 4, 4096
NUM_PLACES: Final = 4
"""How many batches lie side by side: a call's pages have left the caches when it comes again."""


def measure(num_threads: int, num_rounds: int) -> dict[float, list[float]]:
    """Return the seconds of each call, by the idle time before it in ms."""
    blocks_of_call = BATCH * CONTEXT_TOKENS // BLOCK_SIZE
    pages = random_pool(NUM_PLACES * blocks_of_call, torch.bfloat16)[:, 0]
    places = torch.randperm(len(pages)).view(NUM_PLACES, BATCH, -1)
    query = torch.randn(BATCH, NUM_KV_HEADS * GROUP, HEAD_SIZE).bfloat16()
    starts, lens = torch.arange(BATCH + 1), torch.full((BATCH,), CONTEXT_TOKENS)
    kernels = CpuKernels(num_threads)
    calls = [AttentionArguments(query, pages, place, starts, lens) for place in places]
    for call in calls:
        kernels.paged_attention(call)
    seconds: dict[float, list[float]] = {ms: [] for ms in IDLE_MS}
    at = 0
    for _ in range(num_rounds):
        for ms in IDLE_MS:
            if ms:
                time.sleep(ms / 1000)
            else:
                kernels.paged_attention(calls[(at := at + 1) % NUM_PLACES])
            began = time.perf_counter()
            kernels.paged_attention(calls[(at := at + 1) % NUM_PLACES])
            seconds[ms].append(time.perf_counter() - began)
    return seconds


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure decode after idleness.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/attention_idle.json"))
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    described = machine(arguments.threads, arguments.rounds)
    seconds = measure(arguments.threads, arguments.rounds)
    num_bytes = BATCH * CONTEXT_TOKENS * NUM_KV_HEADS * HEAD_SIZE * 2 * 2
    print(", ".join(f"{name} {value}" for name, value in described.items()), end="\n\n")
    print("| idle before, ms | GB/s, p10 | GB/s, median | p10 against no idleness |")
    print("|" + "---|" * 4)
    rows, hot = [], None
    for ms, of_calls in seconds.items():
        p10 = num_bytes / statistics.quantiles(of_calls, n=10, method="inclusive")[0] / 1e9
        p50 = num_bytes / statistics.median(of_calls) / 1e9
        hot = hot or p10
        rows.append({"idle_ms": ms, "p10": round(p10, 2), "p50": round(p50, 2)})
        print(f"| {ms:g} | {p10:.1f} | {p50:.1f} | {p10 / hot - 1:+.0%} |")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": described, "rows": rows}, indent=2) + "\n")
    print(f"\nsaved to {arguments.json}")


if __name__ == "__main__":
    main()
