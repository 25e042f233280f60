"""Prints hit ratios of all eviction policies at several sizes, as a table in Markdown."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.replay.__main__ import HALVES, read_half, replay
from benchmarks.replay.traces import TraceError
from control_plane.config import EVICTION_POLICIES

SIZES_BLOCKS = (500, 1000, 2000, 3000, 4000, 6000, 10_000, 30_000)


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description="Hit ratios of eviction policies, as a table.")
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--half", action="append", choices=HALVES, dest="halves")
    parser.add_argument("--blocks", action="append", type=int, dest="sizes_blocks")
    arguments = parser.parse_args()
    sizes = arguments.sizes_blocks or SIZES_BLOCKS
    print(f"| trace | half | policy | {' | '.join(f'{size:,}' for size in sizes)} |")
    print("|---|---|---|" + "---|" * len(sizes))
    for trace in arguments.traces:
        for half in arguments.halves or ["all"]:
            try:
                requests = read_half(trace, "mooncake", half)
            except TraceError as error:
                sys.exit(f"cannot replay: {error}")
            for policy in EVICTION_POLICIES:
                ratios = [replay(requests, policy, size)["hit_ratio"] for size in sizes]
                cells = " | ".join(f"{ratio:.3f}" for ratio in ratios)
                print(f"| {Path(trace).name} | {half} | {policy} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
