"""Replays a trace of requests to find the share of prompts that a cache of a given size would hit.

    python -m benchmarks.replay --trace FILE|synthetic:NAME:SEED --policy NAME
        --capacity-blocks N [--json OUT] [--format mooncake|bailian|dynamo|kv-cache-tester]
        [--trace-block-tokens N] [--half first|second|all]

The trace drives the control plane's core in this process, one prompt after the other, at the
trace's own times. The hit ratio is the blocks found at the beginnings of the prompts, over all
blocks of the prompts. ``--half`` replays a part of the trace, from an empty cache.
``synthetic.py`` lists the workloads that need no file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay.cache import Cache
from benchmarks.replay.synthetic import named_requests
from benchmarks.replay.traces import FORMATS, Request, TraceError, read_trace
from control_plane.config import EVICTION_POLICIES

HALVES = ("first", "second", "all")


def num_reused(requests: Sequence[Request]) -> int:
    """Return the number of blocks that an unlimited cache would find."""
    known: dict[tuple[int, int], int] = {}  # (number of the prefix before, id) -> its own number
    num = 0
    for request in requests:
        prefix = 0
        for trace_id in request.ids:
            num += (prefix, trace_id) in known
            prefix = known.setdefault((prefix, trace_id), len(known) + 1)
    return num


def replay(requests: Sequence[Request], policy: str, capacity_blocks: int) -> dict[str, object]:
    """Return the counts of a replay, for programs."""
    cache = Cache(capacity_blocks, policy)
    began = time.perf_counter()
    num_hits = sum(cache.run(*request) for request in requests)
    seconds = time.perf_counter() - began
    num_blocks = sum(len(request.ids) for request in requests)
    return {
        "hit_ratio": round(num_hits / max(1, num_blocks), 6),
        "hit_ratio_unlimited": round(num_reused(requests) / max(1, num_blocks), 6),
        "num_requests": len(requests),
        "num_blocks": num_blocks,
        "num_hit_blocks": num_hits,
        "replay_s": round(seconds, 3),
    }


def read_half(trace: str, name: str, half: str) -> list[Request]:
    """Read a trace, or half of it; ``name``: its format. Raises TraceError."""
    is_file = not trace.startswith("synthetic:")
    requests = read_trace(Path(trace), name) if is_file else named_requests(trace)
    middle = len(requests) // 2
    return {"first": requests[:middle], "second": requests[middle:], "all": requests}[half]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main() -> None:
    """Replay, print the ratio, write the JSON."""
    parser = argparse.ArgumentParser(description="Replay a trace of requests in the core.")
    parser.add_argument(
        "--trace", required=True, help="file or folder, may be .gz, or synthetic:NAME:SEED"
    )
    parser.add_argument("--policy", choices=EVICTION_POLICIES, default=EVICTION_POLICIES[0])
    parser.add_argument("--capacity-blocks", type=_positive, required=True, help="of the trace")
    parser.add_argument("--trace-block-tokens", type=_positive, help="default: the format's own")
    parser.add_argument("--format", choices=FORMATS, default="mooncake")
    parser.add_argument("--half", choices=HALVES, default="all")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    try:
        requests = read_half(arguments.trace, arguments.format, arguments.half)
    except TraceError as error:
        sys.exit(f"cannot replay: {error}")
    block_tokens = arguments.trace_block_tokens or FORMATS[arguments.format].block_tokens
    figures = {
        "trace": Path(arguments.trace).name,
        "format": arguments.format,
        "half": arguments.half,
        "policy": arguments.policy,
        "capacity_blocks": arguments.capacity_blocks,
        "trace_block_tokens": block_tokens,
        "capacity_tokens": arguments.capacity_blocks * block_tokens,
        **replay(requests, arguments.policy, arguments.capacity_blocks),
    }
    print(
        f"{arguments.policy}, {arguments.capacity_blocks:,} blocks of {block_tokens} tokens: "
        f"hit ratio {figures['hit_ratio']:.4f} of at most {figures['hit_ratio_unlimited']:.4f}, "
        f"{figures['num_requests']:,} requests in {figures['replay_s']} s"
    )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
