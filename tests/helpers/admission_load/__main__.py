"""Simulates engines that share one pool under the real queue, with requests from a trace.

    python -m tests.helpers.admission_load --trace FILE [--case NAME] [--seeds N] [--duration-s S]
                                   [--json OUT]

A block has 16 tokens. Whole chunks of 512 prompt tokens, the trace's hash ids, are shared and stay
cached. An engine prefills 10,000 tokens a second, decodes a block in 0.32 s, keeps up to 4
sequences, and always has another request. Freed blocks come back 30 ms later, with the receipt. An
engine that is asked to yield frees the sequence and admits it again, with what was generated.

Goodput is the prompt and output tokens of the requests that honest engines finish, by the second of
simulated time. A wait lasts from a request's first ask to its admission; waits that have not ended
count too. Recomputed tokens are those prefilled again after a cut. An engine is served when it is
admitted between the 60th and the 120th second. Time is simulated, so figures do not depend on the
machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.common.report import save
from control_plane.admission.decisions import AdmissionConfig
from tests.helpers.admission_load.cases import CASES, NORMAL, measure


def print_table(results: dict[str, list[dict[str, float]]]) -> None:
    """Print one line for each case, with the mean over its seeds."""
    say = sys.stdout.write
    say(
        f"{'':22}{'goodput':>9}{'of normal':>10}{'served':>10}{'wait p50':>9}{'p99':>7}"
        f"{'recomputed':>11}{'hostile':>9}{'yields':>8}{'cuts':>6}{'ends':>6}\n"
    )
    for name, runs in results.items():
        row = mean(runs)
        normal = mean(results[NORMAL])["goodput_tokens_per_s"] if NORMAL in results else None
        ratio = f"{row['goodput_tokens_per_s'] / normal:.2f}" if normal else "-"
        served = f"{row['num_served']:.0f}/{row['num_engines']:.0f}"
        say(
            f"{name:22}{row['goodput_tokens_per_s']:>9,.0f}{ratio:>10}{served:>10}"
            f"{row['wait_p50_s']:>9.1f}{row['wait_p99_s']:>7.1f}{row['recomputed']:>11.1%}"
            f"{row['hostile_share']:>9.1%}{row['num_yielded']:>8.0f}{row['num_cut']:>6.0f}"
            f"{row['num_ended']:>6.0f}\n"
        )


def mean(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each figure."""
    return {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}


def main() -> None:
    """Simulate, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Simulate engines that share a pool.")
    parser.add_argument("--trace", type=Path, required=True, help="requests, one JSON a line")
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case")
    parser.add_argument("--duration-s", type=float, default=200.0, help="simulated seconds")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = vars(parser.parse_args())
    config = AdmissionConfig()
    rows = [json.loads(line) for line in arguments["trace"].read_text().splitlines()]
    results = {
        name: [
            measure(name, rows, seed=seed, duration_s=arguments["duration_s"], config=config)
            for seed in range(arguments["seeds"])
        ]
        for name in arguments["case"] or CASES
    }
    print_table(results)
    save(arguments["json"], {"rows": results})


if __name__ == "__main__":
    main()
