"""Replays traces of requests to find the share of prompts that a cache of a given size would hit.

    python -m benchmarks.replay FILE ... [--half first|second|all] [--blocks N] [--policy NAME]
                                [--json OUT]

A trace drives the control plane's core in this process, one prompt after the other, at the trace's
own times, with each eviction policy and at each size of the cache, in blocks of the trace. The hit
ratio is the blocks found at the beginnings of the prompts, over all blocks of the prompts; the last
column is that of an unbounded cache. ``--half`` replays a part of the trace, from an empty cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.report import save
from benchmarks.replay.cache import Cache
from benchmarks.replay.traces import Request, TraceError, read_trace, reused
from control_plane.config import EVICTION_POLICIES

HALVES = ("first", "second", "all")
SIZES_BLOCKS = (500, 1000, 2000, 3000, 4000, 6000, 10_000, 30_000)


def replay(requests: Sequence[Request], policy: str, capacity_blocks: int) -> dict[str, object]:
    """Return the counts of a replay, for programs."""
    cache = Cache(capacity_blocks, policy)
    num_hits = sum(cache.run(*request) for request in requests)
    num_blocks = sum(len(request.ids) for request in requests)
    return {
        "hit_ratio": round(num_hits / max(1, num_blocks), 6),
        "hit_ratio_unlimited": round(sum(reused(requests)) / max(1, num_blocks), 6),
        "num_requests": len(requests),
        "num_blocks": num_blocks,
        "num_hit_blocks": num_hits,
    }


def half_of(requests: list[Request], half: str) -> list[Request]:
    """Return a half of a trace, or all of it."""
    middle = len(requests) // 2
    return {"first": requests[:middle], "second": requests[middle:], "all": requests}[half]


def main() -> None:
    """Print the table, row by row; write the JSON."""
    parser = argparse.ArgumentParser(description="Replay traces of requests in the core.")
    parser.add_argument("traces", nargs="+", metavar="FILE", type=Path)
    parser.add_argument("--half", action="append", choices=HALVES, dest="halves")
    parser.add_argument("--blocks", action="append", type=int, dest="sizes", help="of the trace")
    parser.add_argument("--policy", action="append", choices=EVICTION_POLICIES, dest="policies")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    given = parser.parse_args()
    sizes, rows = given.sizes or SIZES_BLOCKS, []
    print(f"| trace | half | policy | {' | '.join(f'{size:,}' for size in sizes)} | unbounded |")
    print("|---|---|---|" + "---|" * (len(sizes) + 1))
    for trace in given.traces:
        try:
            every = read_trace(trace)
        except TraceError as error:
            sys.exit(f"cannot replay: {error}")
        for half in given.halves or ["all"]:
            for policy in given.policies or EVICTION_POLICIES:
                figures = [replay(half_of(every, half), policy, size) for size in sizes]
                ratios = [each["hit_ratio"] for each in figures]
                ratios.append(figures[0]["hit_ratio_unlimited"])
                cells = " | ".join(f"{ratio:.3f}" for ratio in ratios)
                print(f"| {trace.name} | {half} | {policy} | {cells} |", flush=True)
                about = {"trace": str(trace), "half": half, "policy": policy}
                rows += [
                    {**about, "num_cache_blocks": size, **each}
                    for size, each in zip(sizes, figures, strict=True)
                ]
    save(given.json, rows)


if __name__ == "__main__":
    main()
