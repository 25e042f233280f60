"""Measures the engine against transformers' own ways to generate, in one run, and compares tokens.

    python -m benchmarks.engine [--models 31m,197m] [--batches 1,8,32] [--threads 2] [--runs 3]
                                [--sides generate,generate_batch,embedded,remote]
                                [--linears packed] [--quick] [--json OUT]

Sides: ``generate``, transformers' padded batch; ``generate_batch``, its continuous batching;
``plane_cache``, generate on a PlaneCache; ``embedded``, the engine with a data plane in this
process; ``remote``, the engine with one beside it. All compute in this process with the same linear
layers, and take turns: every run has new prompts, which each side answers before the next run.
Models are random and made for this, in float32. ``service``: the share of an embedded decode step
that is neither the model's own work nor the kernels that write and attend.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.threads import tune_torch, waiting

tune_torch()  # before torch is imported

import torch

from benchmarks.engine.share import StepShares
from benchmarks.engine.sides import (
    MODELS,
    SIDES,
    VOCABULARY,
    Prompts,
    Side,
    make_model,
    sides,
)

# What a ratio of tokens a second is to be, at which batches; None: at all.
GOALS: tuple[tuple[str, str, float, tuple[int, ...] | None], ...] = (
    ("embedded", "generate", 1.0, None),
    ("embedded", "generate_batch", 1.0, None),
    ("remote", "embedded", 0.8, (8,)),
)
PREFIX_GOAL = ("embedded", "generate", 2.0)
# The service's share of a step is to be at most this, by model and batch.
SHARE_GOALS = {("31m", 1): 0.20, ("197m", 8): 0.10}
# Tokens that each prompt is continued by: fewer where a step takes long.
NUM_NEW = {"tiny": 32, "31m": 48, "197m": 24}


@dataclass(frozen=True, slots=True)
class Workload:
    """``batch`` prompts, each of ``prefix`` tokens that all share and a few of its own, continued
    by ``num_new`` tokens.
    """

    name: str
    batch: int
    prefix: int
    num_new: int

    def prompts(self, seed: int) -> Prompts:
        """Of lengths that differ, so that a padded batch has padding."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(num: int) -> list[int]:
            return torch.randint(3, VOCABULARY, (num,), generator=generator).tolist()

        prefix = tokens(self.prefix)
        return [prefix + tokens(17 + (13 * i) % 32) for i in range(self.batch)]


@dataclass(slots=True)
class Row:
    """Seconds of each side's runs of one workload, and the runs whose tokens are ``generate``'s."""

    model: str
    workload: Workload
    seconds: dict[str, list[float]] = field(default_factory=dict)
    num_equal: dict[str, int] = field(default_factory=dict)
    service_share: float | None = None
    """Of a decode step of the embedded engine, if it is a side."""

    def tokens_per_s(self, side: str) -> float:
        """The median run's."""
        num_tokens = self.workload.batch * self.workload.num_new
        return num_tokens / statistics.median(self.seconds[side])

    def goals(self) -> list[tuple[str, float, float]]:
        """What is compared, how it stands, and how it should."""
        if self.workload.prefix:
            goals = [PREFIX_GOAL]
        else:
            goals = [g[:3] for g in GOALS if g[3] is None or self.workload.batch in g[3]]
        return [
            (f"{side} / {other}", self.tokens_per_s(side) / self.tokens_per_s(other), goal)
            for side, other, goal in goals
            if side in self.seconds and other in self.seconds
        ]

    @property
    def share_goal(self) -> float | None:
        """What the service's share is to be at most; None for no goal."""
        if self.workload.prefix:
            return None
        return SHARE_GOALS.get((self.model, self.workload.batch))


def measure(
    model: str,
    workload: Workload,
    of: dict[str, Side],
    shares: StepShares | None,
    num_runs: int,
    first_seed: int,
) -> Row:
    """The first run warms up and is not counted."""
    row = Row(model, workload, {name: [] for name in of}, dict.fromkeys(of, 0))
    for run in range(num_runs + 1):
        prompts = workload.prompts(first_seed + run)
        wanted: Prompts | None = None
        for name, side in of.items():
            began_s = time.perf_counter()
            tokens = side(prompts, workload.num_new)
            seconds = time.perf_counter() - began_s
            wanted = tokens if wanted is None else wanted
            if run > 0:
                row.seconds[name].append(seconds)
                row.num_equal[name] += tokens == wanted
    if shares is not None:
        row.service_share = shares.take(workload.batch)
    return row


def print_row(row: Row) -> None:
    """A workload's lines: tokens a second by side, then the goals."""
    name = f"{row.model} {row.workload.name}"
    print(f"{name:28}" + "".join(f"{row.tokens_per_s(side):>15,.1f}" for side in row.seconds))
    num_runs = len(next(iter(row.seconds.values())))
    equal = (f"{row.num_equal[side]}/{num_runs}" for side in row.seconds)
    print(f"{'  runs with equal tokens':28}" + "".join(f"{each:>15}" for each in equal))
    for what, ratio, goal in row.goals():
        print(f"  {what}: {ratio:.2f} (goal: {goal:.1f})")
    if row.service_share is not None:
        goal = "" if row.share_goal is None else f" (goal: at most {row.share_goal:.0%})"
        print(f"  service: {row.service_share:.1%} of a step{goal}")
    sys.stdout.flush()


def as_json(rows: Sequence[Row], threads: int, linears: str) -> dict[str, Any]:
    """The figures, for programs."""
    return {
        "machine": {
            "cpu_count": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": threads,
            "waiting": waiting(),
            "linears": linears,
        },
        "rows": [
            {
                "model": row.model,
                "workload": asdict(row.workload),
                "tokens_per_s": {side: round(row.tokens_per_s(side), 2) for side in row.seconds},
                "seconds": row.seconds,
                "num_equal": row.num_equal,
                "goals": [
                    {"what": what, "ratio": round(ratio, 3), "goal": goal}
                    for what, ratio, goal in row.goals()
                ],
                "service_share": row.service_share,
                "service_share_goal": row.share_goal,
            }
            for row in rows
        ],
    }


def workloads(model: str, batches: Sequence[int], part: int) -> list[Workload]:
    """Those of a model: one part of the whole. The largest has no shared prefix, which would
    take minutes to compute again and again.
    """
    num_new = NUM_NEW[model] // part
    made = [Workload(f"decode, batch {n}", n, 0, num_new) for n in batches]
    if model != "197m":
        made.append(Workload("shared prefix, batch 8", 8, 512 // part, 16 // min(part, 4)))
    return made


def main(argv: Sequence[str]) -> None:
    """Measure, print as it goes, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure the engine against transformers.")
    parser.add_argument("--models", default="31m,197m", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--batches", default="1,8,32", help="sizes of batches")
    parser.add_argument("--threads", type=int, default=2, help="threads that compute")
    parser.add_argument("--runs", type=int, default=3, help="runs of each workload")
    parser.add_argument(
        "--sides", default="generate,generate_batch,embedded,remote", help=f"of {', '.join(SIDES)}"
    )
    parser.add_argument("--linears", default="packed", choices=("packed", "torch"))
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    given = parser.parse_args(argv)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    torch.set_num_threads(given.threads)
    print(f"{given.threads} threads, {waiting()}, {given.linears} linear layers")
    batches = [int(batch) for batch in given.batches.split(",")]
    chosen = [name for name in SIDES if name in given.sides.split(",")]
    rows: list[Row] = []
    for model in given.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_model(model, Path(scratch))
            with sides(folder, chosen, given.threads, given.linears) as (of, shares):
                print(f"{'tokens/s':28}" + "".join(f"{name:>15}" for name in of))
                for number, workload in enumerate(
                    workloads(model, batches, 8 if given.quick else 1)
                ):
                    row = measure(model, workload, of, shares, given.runs, 1000 * number)
                    print_row(row)
                    rows.append(row)
    if given.json is not None:
        figures = as_json(rows, given.threads, given.linears)
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
