"""Measures a router before several engines on a trace of requests, in simulated time.

    python -m integrations.router.benchmarks --trace FILE|synthetic:NAME:SEED [--policy NAME]...
        [--json OUT] [--engines N] [--capacity-blocks N] [--prefill-tokens-per-s RATE]
        [--feed-lag-s S] [--check]

Each half of the trace is reported separately, from one run over all of it: settings chosen on the
first half can be judged on the second. ``--check`` ends with 1 when ``seconds`` misses its floors
on the whole. ``policies.py`` lists the policies.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.replay.synthetic import read
from benchmarks.replay.traces import BLOCK_TOKENS, TraceError

from ..picker import HIT_BIAS
from .fleet import Fleet, Outcome, Shape
from .policies import POLICIES, PolicyRouter

CHOSEN = f"seconds:{HIT_BIAS:g}"
# Floors of the chosen policy; the second is a part of round-robin's time.
LEAST_HIT_RATIO, MOST_OF_ROUND_ROBIN, MOST_OVER_MEAN = 0.29, 0.45, 1.1

_DEFAULT = Shape()
Figures = dict[str, Any]


def figures_of(outcomes: Sequence[Outcome], num_engines: int) -> Figures:
    """Return hit ratio, times to first tokens in seconds, and unevenness of the requests."""
    times_s = sorted(outcome.first_token_s for outcome in outcomes)
    placed = Counter(outcome.engine for outcome in outcomes)
    num_blocks = sum(outcome.num_blocks for outcome in outcomes)
    return {
        "hit_ratio": round(sum(o.num_hits for o in outcomes) / max(1, num_blocks), 4),
        "first_token_mean_s": round(sum(times_s) / len(times_s), 3),
        "first_token_p50_s": round(times_s[len(times_s) // 2], 3),
        "first_token_p95_s": round(times_s[len(times_s) * 95 // 100], 3),
        "first_token_p99_s": round(times_s[len(times_s) * 99 // 100], 3),
        "requests_max_over_mean": round(max(placed.values()) * num_engines / len(outcomes), 3),
    }


def faults(of_policies: Mapping[str, Mapping[str, Figures]]) -> list[str]:
    """Return the floors that the chosen policy misses on the whole trace."""
    chosen, base = of_policies[CHOSEN]["all"], of_policies["round-robin"]["all"]
    ratio = chosen["first_token_mean_s"] / base["first_token_mean_s"]
    return [
        f"{CHOSEN}: {name} {value:.3f}, must be {bound}"
        for name, value, bound, holds in (
            ("hit ratio", chosen["hit_ratio"], f"at least {LEAST_HIT_RATIO}",
             chosen["hit_ratio"] >= LEAST_HIT_RATIO),
            ("first token over round-robin", ratio, f"at most {MOST_OF_ROUND_ROBIN}",
             ratio <= MOST_OF_ROUND_ROBIN),
            ("requests max/mean", chosen["requests_max_over_mean"], f"at most {MOST_OVER_MEAN}",
             chosen["requests_max_over_mean"] <= MOST_OVER_MEAN),
        )
        if not holds
    ]  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulate a router on a trace of requests.")
    parser.add_argument(
        "--trace", required=True, help="file or folder, may be .gz, or synthetic:NAME:SEED"
    )
    parser.add_argument("--policy", action="append", dest="policies", help="default: all")
    parser.add_argument("--engines", type=int, default=_DEFAULT.num_engines)
    parser.add_argument("--capacity-blocks", type=int, default=_DEFAULT.capacity_blocks)
    parser.add_argument("--prefill-tokens-per-s", type=float, default=_DEFAULT.prefill_tokens_per_s)
    parser.add_argument("--feed-lag-s", type=float, default=_DEFAULT.feed_lag_s)
    parser.add_argument("--check", action="store_true", help="end with 1 below the floors")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    arguments.policies = arguments.policies or list(POLICIES)
    if arguments.check:
        needed = ("round-robin", CHOSEN)
        arguments.policies += [each for each in needed if each not in arguments.policies]
    return arguments


def main() -> None:
    """Run all policies, print a table, write the JSON."""
    arguments = _arguments()
    try:
        requests = read(arguments.trace)
    except TraceError as error:
        sys.exit(f"cannot simulate: {error}")
    shape = Shape(
        num_engines=arguments.engines,
        capacity_blocks=arguments.capacity_blocks,
        block_tokens=BLOCK_TOKENS,
        prefill_tokens_per_s=arguments.prefill_tokens_per_s,
        feed_lag_s=arguments.feed_lag_s,
    )
    print("| policy | half | hit ratio | first token: mean, p50, p95, p99, s | requests max/mean |")
    print("|---|---|---|---|---|")
    of_policies: dict[str, dict[str, Figures]] = {}
    for policy in arguments.policies:
        began = time.perf_counter()
        fleet = Fleet(shape)
        outcomes = fleet.run(requests, PolicyRouter(policy, shape, fleet.prompts))
        middle = len(outcomes) // 2
        halves = {"first": outcomes[:middle], "second": outcomes[middle:], "all": outcomes}
        of_policies[policy] = {
            half: figures_of(part, shape.num_engines) for half, part in halves.items()
        }
        for half, figures in of_policies[policy].items():
            hit, *times, spread = figures.values()
            print(
                f"| {policy} | {half} | {hit:.3f} | {', '.join(map(str, times))} | {spread:.2f} |"
            )
        print(f"{policy}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    if arguments.json:
        result = {"trace": Path(arguments.trace).name, "policies": of_policies}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.check and (missed := faults(of_policies)):
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
