"""Measures the sides on one workload after the other, and compares them with their goals."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.engine.sides import VOCABULARY, Answer, Prompts
from kvplane.sync.short_thread import call_in_short_thread

# Goals for ratios of tokens a second, by batch; None: all batches.
GOALS: tuple[tuple[str, str, float, tuple[int, ...] | None], ...] = (
    ("embedded", "generate", 1.0, None),
    ("remote", "embedded", 0.8, (8,)),
    ("compiled", "vllm", 0.9, (1,)),
    ("compiled", "vllm", 1.0, (8, 32)),
)
PREFIX_GOAL = ("embedded", "generate", 2.0)
# New tokens of each prompt: fewer where a step takes long.
NUM_NEW = {"tiny": 32, "31m": 48, "197m": 24}


@dataclass(frozen=True, slots=True)
class Workload:
    """``batch`` prompts, each of ``prefix`` tokens that all share and ``num_own`` of its own,
    continued by ``num_new`` tokens. ``num_own``: 0 for 5 to 16, so that a padded batch has padding.
    """

    name: str
    batch: int
    prefix: int
    num_new: int
    num_own: int = 0

    def prompts(self, seed: int) -> Prompts:
        """Return random prompts."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(num: int) -> list[int]:
            return torch.randint(3, VOCABULARY, (num,), generator=generator).tolist()

        prefix = tokens(self.prefix)
        return [prefix + tokens(self.num_own or 5 + (5 * i) % 12) for i in range(self.batch)]


@dataclass(slots=True)
class Row:
    """Seconds of each side's runs of one workload, and the runs whose tokens are ``generate``'s."""

    model: str
    workload: Workload
    seconds: dict[str, list[float]] = field(default_factory=dict)
    num_equal: dict[str, int] = field(default_factory=dict)

    def tokens_per_s(self, side: str) -> float:
        """Return the median run's rate."""
        num_tokens = self.workload.batch * self.workload.num_new
        return num_tokens / statistics.median(self.seconds[side])

    def goals(self) -> list[tuple[str, float, float]]:
        """Return each comparison's name, its figure and its goal."""
        if self.workload.prefix:
            goals = [PREFIX_GOAL]
        else:
            goals = [g[:3] for g in GOALS if g[3] is None or self.workload.batch in g[3]]
        return [
            (f"{side} / {other}", self.tokens_per_s(side) / self.tokens_per_s(other), goal)
            for side, other, goal in goals
            if side in self.seconds and other in self.seconds
        ]


def measure(
    model: str,
    workload: Workload,
    of: dict[str, Answer],
    num_runs: int,
    first_seed: int,
) -> Row:
    """Run the sides, taking turns at being first. The first run warms up and does not count. Each
    run has a thread of its own, so that no side computes beside torch threads of another.
    """
    row = Row(model, workload, {name: [] for name in of}, dict.fromkeys(of, 0))
    for run in range(num_runs + 1):
        prompts = workload.prompts(first_seed + run)
        first, names = run % len(of), [*of]
        tokens: dict[str, Prompts] = {}
        for name in names[first:] + names[:first]:
            task = partial(timed, of[name], prompts, workload.num_new)
            tokens[name], seconds = call_in_short_thread(task)
            if run > 0:
                row.seconds[name].append(seconds)
        if run > 0:
            for name in names:
                row.num_equal[name] += tokens[name] == tokens[names[0]]
    return row


def timed(answer: Answer, prompts: Prompts, num_new: int) -> tuple[Prompts, float]:
    """Return a side's tokens, and the seconds that they took, prompts and all."""
    began_s = time.perf_counter()
    tokens = answer(prompts, num_new)
    return tokens, time.perf_counter() - began_s


def print_row(row: Row) -> None:
    """Print a workload's lines: tokens a second by side, then the goals."""
    name = f"{row.model} {row.workload.name}"
    print(f"{name:28}" + "".join(f"{row.tokens_per_s(side):>15,.1f}" for side in row.seconds))
    num_runs = len(next(iter(row.seconds.values())))
    equal = (f"{row.num_equal[side]}/{num_runs}" for side in row.seconds)
    print(f"{'  runs with equal tokens':28}" + "".join(f"{each:>15}" for each in equal))
    for what, ratio, goal in row.goals():
        print(f"  {what}: {ratio:.2f} (goal: {goal:.1f})")
    sys.stdout.flush()


def as_json(row: Row) -> dict[str, Any]:
    """Return a row for programs."""
    return {
        "model": row.model,
        "workload": asdict(row.workload),
        "tokens_per_s": {side: round(row.tokens_per_s(side), 2) for side in row.seconds},
        "seconds": row.seconds,
        "num_equal": row.num_equal,
        "goals": [
            {"what": what, "ratio": round(ratio, 3), "goal": goal}
            for what, ratio, goal in row.goals()
        ],
    }


def workloads(
    model: str, batches: Sequence[int], part: int, num_own: int, num_new: int
) -> list[Workload]:
    """Return a model's workloads, in which each prefix is one part. The largest model, and a chosen
    length of prompts, has no shared prefix, which would take minutes to compute again and again.
    """
    num_new = (num_new or NUM_NEW[model]) // part
    made = [Workload(f"decode, batch {n}", n, 0, num_new, num_own) for n in batches]
    if model != "197m" and not num_own:
        made.append(Workload("shared prefix, batch 8", 8, 512 // part, 16 // min(part, 4)))
    return made
