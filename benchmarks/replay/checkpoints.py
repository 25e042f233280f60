"""Replays traces as a hybrid model would run them, to find where checkpoints of its states pay.

    python -m benchmarks.replay.checkpoints FILE ... [--blocks N] [--checkpoint-blocks N]

A prompt of a hybrid model is found as far as its deepest checkpoint. One takes the memory of
several blocks, so each size of memory, in blocks of the trace, is divided between blocks and
checkpoints in the shares below, and the best one is printed behind the hit ratio, with the bytes of
all checkpoints that were written, in the largest memory. The rules: at the end of a prompt; at its
end and where it forks from what was seen before; after every Nth block of the trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.replay.cache import Cache
from benchmarks.replay.traces import BLOCK_TOKENS, Request, read_trace, reused

RULES: Final = ("ends", "ends and forks", 64, 16, 4, 1)
SHARES: Final = (0.05, 0.1, 0.25, 0.5)
SIZES_BLOCKS: Final = (1000, 2000, 4000)
# Of Qwen3-Next 80B in bfloat16: 36 layers with states of 32 heads of 128 x 128 and 3 columns of
# 8,192 of a convolution, beside 12 layers with keys and values of 2 heads of 256.
CHECKPOINT_BYTES: Final = 36 * 2 * (32 * 128 * 128 + 3 * 8192)
BLOCK_BYTES: Final = 12 * 2 * 2 * (2 * 256) * BLOCK_TOKENS


def replay(
    requests: Sequence[Request], rule: int | str, num_blocks: int, num_checkpoints: int
) -> tuple[float, int]:
    """Return the hit ratio, and how many checkpoints were written."""
    cache = Cache(num_blocks, "lru", num_checkpoints=num_checkpoints)
    num_hits = num_written = 0
    for request, fork in zip(requests, reused(requests), strict=True):

        def places(num_cached: int, num: int, fork: int = fork) -> Iterable[int]:
            if isinstance(rule, int):
                return range(num_cached - num_cached % rule + rule, num + 1, rule)
            wanted = {num, min(fork, num)} if rule == "ends and forks" else {num}
            return sorted(place for place in wanted if place > num_cached)

        hits, written = cache.run_hybrid(*request, places)
        num_hits, num_written = num_hits + hits, num_written + written
    return num_hits / max(1, sum(len(request.ids) for request in requests)), num_written


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description="Replay traces as a hybrid model would run them.")
    parser.add_argument("traces", nargs="+", metavar="FILE", type=Path)
    parser.add_argument("--blocks", action="append", type=int, dest="sizes", help="of the trace")
    ratio = CHECKPOINT_BYTES / BLOCK_BYTES
    parser.add_argument("--checkpoint-blocks", type=float, default=ratio, help="%(default).1f")
    given = parser.parse_args()
    sizes = given.sizes or SIZES_BLOCKS
    print(f"| trace | checkpoints | {' | '.join(f'{size:,}' for size in sizes)} | GB written |")
    print("|---|---|" + "---|" * (len(sizes) + 1))
    for trace in given.traces:
        requests = read_trace(trace)
        for rule in RULES:
            cells, written = [], 0
            for size in sizes:
                best = (0.0, 0, 0.0)
                for share in SHARES:
                    num_checkpoints = max(1, int(size * share / given.checkpoint_blocks))
                    num_blocks = int(size * (1 - share))
                    found = replay(requests, rule, num_blocks, num_checkpoints)
                    best = max(best, (*found, share))
                cells.append(f"{best[0]:.3f} ({best[2]:.2f})")
                written = best[1]
            name = f"every {rule}" if isinstance(rule, int) else rule
            size_gb = written * given.checkpoint_blocks * BLOCK_BYTES / 1e9
            cells.append(f"{size_gb:,.0f}")
            print(f"| {trace.name} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
