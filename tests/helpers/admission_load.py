"""Simulates engines that share one pool under the real queue.

    python -m tests.helpers.admission_load [--case NAME] [--seeds N] [--duration-s S] [--json OUT]

A block has 16 tokens. Prompts have 1,000 to 25,000 tokens and answers 20 to 600; no prompts share a
prefix. An engine prefills 10,000 tokens a second, decodes a block in 0.32 s, keeps up to 4
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
import heapq
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.common.report import markdown, save
from benchmarks.common.timing import quantile
from control_plane.admission.decisions import AdmissionConfig, Cut, EndSession, Growth, Pressure
from tests.helpers.planning.admission_rig import Rig

NUM_BLOCKS: Final = 36_000
BLOCK_TOKENS: Final = 16
DECODE_BLOCK_S: Final = 0.32
PREFILL_TOKENS_PER_S: Final = 10_000.0
RECEIPT_S: Final = 0.03
POLL_S: Final = 0.03
TICK_S: Final = 0.25
NUM_SEQUENCES: Final = 4
JUMP_BLOCKS: Final = 30_000
SERVED_S: Final = (60.0, 120.0)
NORMAL: Final = "normal"

# Requests, as tokens of the prompt and of the answer, of kinds of engines besides "honest":
#   idle     does nothing with what it was admitted
#   greedy   generates without end
#   polling  asks every 30 ms and never stands in the queue
#   silent   sends no receipts; opens a new session when its own is ended
#   jumping  grows by most of the pool at once, and generates without end
#   large    has requests which take nearly a turn
ENDLESS: Final = 10**6
REQUESTS: Final = {
    "idle": (32_000, ENDLESS),
    "greedy": (8_000, ENDLESS),
    "jumping": (512, ENDLESS),
    "large": (32_000, 1_280),
}
HOSTILE: Final = ("idle", "greedy", "polling", "silent")
CASES: Final[dict[str, dict[str, int]]] = {
    "light": {"honest": 6},
    NORMAL: {"honest": 11},  # all sequences just fit the pool
    "overload": {"honest": 120},
    **{f"overload, {kind}": {"honest": 108, kind: 12} for kind in HOSTILE},
    "overload, one jumping": {"honest": 119, "jumping": 1},
    "overload, jumping": {"honest": 108, "jumping": 12},
    "overload, large": {"honest": 108, "large": 12},
    "overload, all four": {"honest": 108, **dict.fromkeys(HOSTILE, 3)},
}


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and its output. ``num_seen``: tokens that were computed before, once."""

    num_prompt: int
    num_output: int
    asked_s: float
    num_made: int = 0
    num_seen: int = 0
    admitted: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_made


@dataclass(slots=True, eq=False)
class Engine:
    """An engine with one open session. ``asked``: the request that it wants to be admitted."""

    kind: str
    session: int
    live: dict[int, Request] = field(default_factory=dict)
    again: deque[Request] = field(default_factory=deque)
    asked: Request | None = None
    asked_id: int = 0
    gpu_free_s: float = 0.0
    admitted_s: list[float] = field(default_factory=list)

    @property
    def is_honest(self) -> bool:
        return self.kind == "honest"


class Simulation:
    """Engines, their pool and its queue, from second 0 on."""

    def __init__(self, case: dict[str, int], seed: int, config: AdmissionConfig) -> None:
        kinds = [kind for kind, num in case.items() for _ in range(num)]
        self.engines = [Engine(kind, session) for session, kind in enumerate(kinds)]
        self.rig = Rig(NUM_BLOCKS, len(kinds), config)
        self.waits_s: list[float] = []
        self.num_good = self.num_computed = self.num_recomputed = 0
        self.num_cut = self.num_yielded = self.num_ended = 0
        self.hostile_block_s = 0.0
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._ids = itertools.count(), itertools.count(1)
        for engine in self.engines:
            self._after(self._random.random() * 0.5, self._ask, engine)
        self._after(TICK_S, self._tick)

    def run(self, duration_s: float) -> Simulation:
        while self._events[0][0] < duration_s:
            self.rig.now_s, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        for engine in self.engines:
            if engine.is_honest and engine.asked is not None and not engine.asked.admitted:
                self.waits_s.append(duration_s - engine.asked.asked_s)
        return self

    def _after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self.rig.now_s + delay_s, next(self._order), call, arguments))

    # Engines

    def _next_request(self, engine: Engine) -> Request:
        if engine.again:
            return engine.again.popleft()
        usual = self._random.randint(1_000, 25_000), self._random.randint(20, 600)
        return Request(*REQUESTS.get(engine.kind, usual), self.rig.now_s)

    def _ask(self, engine: Engine) -> None:
        if len(engine.live) == NUM_SEQUENCES:
            return
        if engine.asked is None:
            engine.asked, engine.asked_id = self._next_request(engine), next(self._ids)
        num_needed = -(-engine.asked.num_tokens // BLOCK_TOKENS)
        stands = engine.kind != "polling"
        if self.rig.ask(engine.session, engine.asked_id, num_needed, wait=stands) is None:
            self._admitted(engine)
        elif not stands:
            self._after(POLL_S, self._ask, engine)

    def _admitted(self, engine: Engine) -> None:
        request, sequence, now_s = engine.asked, engine.asked_id, self.rig.now_s
        assert request is not None
        engine.live[sequence], engine.asked = request, None
        engine.admitted_s.append(now_s)
        if not request.admitted and engine.is_honest:
            self.waits_s.append(now_s - request.asked_s)
        request.admitted = True
        self.num_computed += request.num_tokens
        self.num_recomputed += min(request.num_seen, request.num_tokens)
        self.rig.computed.add((engine.session, sequence))
        engine.gpu_free_s = max(engine.gpu_free_s, now_s)
        engine.gpu_free_s += request.num_tokens / PREFILL_TOKENS_PER_S
        self._after(engine.gpu_free_s - now_s, self._prefilled, engine, sequence)
        self._after(0.0, self._ask, engine)

    def _prefilled(self, engine: Engine, sequence: int) -> None:
        self.rig.computed.discard((engine.session, sequence))
        request = engine.live.get(sequence)
        if request is None:
            return
        self.rig.go_on(engine.session, sequence)
        request.num_seen = max(request.num_seen, request.num_tokens)
        if engine.kind == "jumping":
            self._grow(engine, sequence, JUMP_BLOCKS)
        elif engine.kind != "idle":
            self._after(DECODE_BLOCK_S, self._decoded, engine, sequence)

    def _decoded(self, engine: Engine, sequence: int) -> None:
        """Note a filled block: the sequence ends, or needs another."""
        request = engine.live.get(sequence)
        if request is None:
            return
        self.rig.go_on(engine.session, sequence)
        request.num_made += BLOCK_TOKENS
        request.num_seen = max(request.num_seen, request.num_tokens)
        self.num_computed += BLOCK_TOKENS
        if request.num_made < request.num_output:
            self._grow(engine, sequence, 1)
            return
        if engine.is_honest:
            self.num_good += request.num_prompt + request.num_output
        self._end(engine, sequence)
        self._ask(engine)

    def _grow(self, engine: Engine, sequence: int, num_blocks: int) -> None:
        """Grow, and decode what was given; else the queue grants it later."""
        if self.rig.grow(engine.session, sequence, num_blocks):
            self._after(DECODE_BLOCK_S, self._decoded, engine, sequence)

    def _end(self, engine: Engine, sequence: int) -> None:
        self.rig.end(engine.session, sequence)
        del engine.live[sequence]
        self._release(engine)

    def _release(self, engine: Engine) -> None:
        if engine.kind != "silent":
            self._after(RECEIPT_S, self._receipt, engine.session)

    def _receipt(self, session: int) -> None:
        self.rig.receipt(session)
        self._serve()

    def _again(self, engine: Engine, request: Request) -> None:
        """Ask again for a sequence that was cut or given up, before the engine's other requests."""
        engine.again.append(request)
        self._after(0.0, self._ask, engine)

    # The control plane

    def _serve(self) -> None:
        for grant in self.rig.serve():
            engine = self.engines[grant.session]
            if isinstance(grant, Growth):
                self._after(DECODE_BLOCK_S, self._decoded, engine, grant.sequence)
            else:
                self._admitted(engine)

    def _tick(self) -> None:
        for decision in self.rig.tick():
            engine = self.engines[decision.session]
            match decision:
                case Pressure(sequence=sequence):
                    if engine.is_honest:
                        self.num_yielded += 1
                        request = engine.live[sequence]
                        self._end(engine, sequence)
                        self._again(engine, request)
                case Cut(sequence=sequence):
                    self.num_cut += 1
                    self._again(engine, engine.live.pop(sequence))
                    self._release(engine)
                case EndSession():
                    self.num_ended += 1
                    engine.asked = None
                    for sequence in list(engine.live):
                        self._again(engine, engine.live.pop(sequence))
                    self._after(0.0, self._ask, engine)
        self._serve()
        hostile = (engine.session for engine in self.engines if not engine.is_honest)
        self.hostile_block_s += TICK_S * sum(map(self.rig.num_held_by, hostile))
        self._after(TICK_S, self._tick)


def measure(
    name: str, *, seed: int, duration_s: float, config: AdmissionConfig
) -> dict[str, float]:
    """Return the figures of one case."""
    done = Simulation(CASES[name], seed, config).run(duration_s)
    honest = [engine for engine in done.engines if engine.is_honest]
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


def main() -> None:
    """Simulate, print a table of means over the seeds, write the JSON."""
    parser = argparse.ArgumentParser(description="Simulate engines that share a pool.")
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case")
    parser.add_argument("--duration-s", type=float, default=200.0, help="simulated seconds")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    config, means = AdmissionConfig(), dict[str, dict[str, float]]()
    for name in options.case or CASES:
        runs = [
            measure(name, seed=seed, duration_s=options.duration_s, config=config)
            for seed in range(options.seeds)
        ]
        means[name] = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
    heads = ["case", *next(iter(means.values()))]
    rows = ([name, *(f"{value:.4g}" for value in row.values())] for name, row in means.items())
    sys.stdout.write("\n".join(markdown(heads, rows)) + "\n")
    save(options.json, {"rows": means})


if __name__ == "__main__":
    main()
