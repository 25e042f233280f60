"""The engines of each case, and the figures measured."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from benchmarks.common.timing import quantile
from control_plane.admission.decisions import AdmissionConfig
from tests.helpers.admission_load.pool import NUM_BLOCKS, Engine, Request
from tests.helpers.admission_load.simulation import Simulation

SERVED_S: Final = (60.0, 120.0)
NORMAL: Final = "normal"

# Kinds of engines, besides "honest":
#   idle     admits 32,000 tokens and does nothing with them
#   greedy   admits 8,000 tokens and generates without end
#   polling  asks every 30 ms and never stands in the queue
#   silent   sends no receipts; opens a new session when its own is ended
#   jumping  admits 512 tokens, grows by most of the pool at once, and generates without end
#   large    has requests of 32,000 tokens only, which take nearly a turn
HOSTILE: Final = ("idle", "greedy", "polling", "silent")
CASES: Final[dict[str, dict[str, int]]] = {
    "light": {"honest": 6},
    NORMAL: {"honest": 12},  # all sequences just fit the pool
    "overload": {"honest": 120},
    **{f"overload, {kind}": {"honest": 108, kind: 12} for kind in HOSTILE},
    "overload, one jumping": {"honest": 119, "jumping": 1},
    "overload, jumping": {"honest": 108, "jumping": 12},
    "overload, large": {"honest": 108, "large": 12},
    "overload, all four": {"honest": 108, **dict.fromkeys(HOSTILE, 3)},
}


def measure(
    name: str, rows: list[dict[str, Any]], *, seed: int, duration_s: float, config: AdmissionConfig
) -> dict[str, float]:
    """Return the figures of one case."""
    random.seed(seed)
    trace = itertools.cycle(rows[random.randrange(len(rows)) :] + rows if seed else rows)
    kinds = [kind for kind, num in CASES[name].items() for _ in range(num)]
    engines = [Engine(kind, requests(kind, trace)) for kind in kinds]
    done = Simulation(engines, config).run(duration_s)
    honest = [engine for engine in engines if engine.kind == "honest"]
    begin_s, end_s = SERVED_S
    waits_s = sorted(done.waits_s)
    return {
        "goodput_tokens_per_s": round(done.num_good / duration_s),
        "num_engines": len(honest),
        "num_served": sum(any(begin_s <= t < end_s for t in e.admitted_s) for e in honest),
        "wait_p50_s": round(quantile(waits_s, 0.5), 1),
        "wait_p99_s": round(quantile(waits_s, 0.99), 1),
        "recomputed": round(done.num_recomputed / max(1, done.num_computed), 4),
        "hostile_share": round(done.hostile_block_s / (NUM_BLOCKS * duration_s), 3),
        "num_yielded": done.num_yielded,
        "num_cut": done.num_cut,
        "num_ended": done.num_ended,
    }


def requests(kind: str, trace: Iterator[dict[str, Any]]) -> Callable[[], Request]:
    """Return a function that makes an engine's next request."""
    if kind == "idle":
        return lambda: Request([], 32_000, 10**6)
    if kind == "greedy":
        return lambda: Request([], 8_000, 10**6)
    if kind == "large":
        return lambda: Request([], 32_000, 1_280)
    if kind == "jumping":
        return lambda: Request([], 512, 10**6)

    def next_request() -> Request:
        row = next(trace)
        return Request(row["hash_ids"], row["input_length"], row["output_length"])

    return next_request
