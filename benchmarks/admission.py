"""Simulates engines that share one pool under the real line, with requests from a trace.

    python -m benchmarks.admission --trace FILE [--case NAME] [--seeds N] [--duration-s S]
                                   [--json OUT]

Blocks of 16 tokens. Whole prefixes of 512 tokens, the trace's hash ids, are shared and stay cached.
An engine prefills 10,000 tokens a second, decodes a block in 0.32 s, keeps up to 4 sequences, and
always has another request. Freed blocks come back 30 ms later, with the receipt. An engine that is
asked to yield frees the sequence and admits it again, with what was generated.

Goodput is the prompt and output tokens of the requests that honest engines finish, by the second of
simulated time. A wait is from a request's first ask to its admission, and counts also when it has
not ended. Recomputed tokens are those prefilled again after a cut. An engine is served when it is
admitted between the 60th and the 120th second. Time is simulated, so figures do not depend on the
machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control_plane.planning.admission.decisions import (
    AdmissionConfig,
    Cut,
    EndSession,
    Growth,
    Pressure,
)
from control_plane.planning.admission.line import Line

BLOCK_TOKENS = 16
CHUNK_BLOCKS = 32
CHUNK_TOKENS = BLOCK_TOKENS * CHUNK_BLOCKS
DECODE_BLOCK_S = 0.32
PREFILL_TOKENS_PER_S = 10_000.0
RECEIPT_S = 0.03
POLL_S = 0.03
TICK_S = 0.25
NUM_BLOCKS = 36_000
NUM_SEQUENCES = 4
SERVED_S = (60.0, 120.0)
NORMAL, TARGET = "normal", 0.9

# Kinds of engines, besides "honest":
#   idle     admits 32,000 tokens and does nothing with them
#   greedy   admits 8,000 tokens and generates without end
#   polling  asks every 30 ms and never stands in the line
#   silent   sends no receipts; opens a new session when its own is ended
HOSTILE = ("idle", "greedy", "polling", "silent")
CASES: dict[str, dict[str, int]] = {
    "light": {"honest": 6},
    NORMAL: {"honest": 12},  # all sequences just fit the pool
    "overload": {"honest": 120},
    **{f"overload, {kind}": {"honest": 108, kind: 12} for kind in HOSTILE},
    "overload, all four": {"honest": 108, **dict.fromkeys(HOSTILE, 3)},
}


@dataclass(slots=True)
class Request:
    """``num_seen``: tokens that were computed before, once."""

    ids: list[int]
    num_prompt: int
    num_output: int
    num_made: int = 0
    num_seen: int = 0
    asked_s: float | None = None
    admitted: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_made


@dataclass(slots=True, eq=False)
class Live:
    """A sequence that holds ``chunks``, which are shared, and blocks of its own."""

    engine: Engine
    id: int
    request: Request
    chunks: list[int]
    num_own: int
    progress_s: float
    prefilled: bool = False
    gone: bool = False

    @property
    def num_blocks(self) -> int:
        return self.num_own + CHUNK_BLOCKS * len(self.chunks)


@dataclass(slots=True, eq=False)
class Engine:
    """An engine with one open session."""

    kind: str
    new_request: Callable[[], Request]
    session: int = 0
    live: dict[int, Live] = field(default_factory=dict)
    again: deque[Request] = field(default_factory=deque)
    asked: Request | None = None
    asked_id: int = 0
    gpu_free_s: float = 0.0
    admitted_s: list[float] = field(default_factory=list)


class Blocks:
    """The pool, as the line sees it."""

    num_blocks = NUM_BLOCKS

    def __init__(self, live: Callable[[int], dict[int, Live]]) -> None:
        self._live = live
        self.num_used = 0
        self.num_retired = 0
        self.references: dict[int, int] = {}  # chunk -> sequences that refer to it; 0: cached
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._retired: dict[int, deque[list[float]]] = defaultdict(deque)  # [since, blocks]
        self._num_retired: Counter[int] = Counter()

    def num_obtainable(self, session: int) -> int:
        return self._num_free() + self._num_retired[session]

    def num_pending(self, session: int) -> int:
        return self.num_retired - self._num_retired[session]

    def num_held(self, session: int, sequence: int) -> int:
        return self._live(session)[sequence].num_blocks

    def num_held_by(self, session: int) -> int:
        return sum(live.num_blocks for live in self._live(session).values())

    def last_progress(self, session: int, sequence: int) -> tuple[float, bool]:
        live = self._live(session)[sequence]
        return live.progress_s, not live.prefilled

    def retired_since(self, session: int) -> float | None:
        entries = self._retired[session]
        return entries[0][0] if entries else None

    def hits(self, request: Request) -> list[int]:
        """Leading chunks that are there; the last token is always computed."""
        at_most = (request.num_prompt - 1) // CHUNK_TOKENS
        return list(itertools.takewhile(self.references.__contains__, request.ids[:at_most]))

    def num_needed(self, request: Request, hits: list[int]) -> int:
        """Blocks to obtain: all but the hits in use."""
        num_in_use = sum(self.references[chunk] > 0 for chunk in hits)
        return -(-request.num_tokens // BLOCK_TOKENS) - CHUNK_BLOCKS * num_in_use

    def take(self, session: int, num_blocks: int) -> None:
        """Allocate: free and evictable blocks first, then the session's own retired ones."""
        num_own = max(0, num_blocks - self._num_free())
        self._unretire(session, num_own)
        self.num_used += num_blocks
        while self.num_used + self.num_retired + CHUNK_BLOCKS * len(self._cached) > NUM_BLOCKS:
            del self.references[self._cached.popitem(last=False)[0]]

    def refer(self, chunks: list[int]) -> None:
        for chunk in chunks:
            if not self.references[chunk]:
                del self._cached[chunk]
            self.references[chunk] += 1

    def release(self, live: Live, now_s: float) -> list[float]:
        """Retire what only this sequence held; returns the entry for ``receipt``."""
        num_blocks = live.num_own
        for chunk in reversed(live.chunks):
            self.references[chunk] -= 1
            if not self.references[chunk]:
                self._cached[chunk] = None
                num_blocks += CHUNK_BLOCKS
        self.num_used -= num_blocks
        self.num_retired += num_blocks
        session = live.engine.session
        self._num_retired[session] += num_blocks
        entry = [now_s, num_blocks]
        self._retired[session].append(entry)
        return entry

    def receipt(self, session: int, entry: list[float]) -> None:
        """What is left of an entry can be allocated by all."""
        if entry in self._retired[session]:
            self._unretire(session, int(entry[1]))

    def fenced(self, session: int) -> None:
        self._unretire(session, self._num_retired[session])

    def _unretire(self, session: int, num_blocks: int) -> None:
        entries = self._retired[session]
        self._num_retired[session] -= num_blocks
        self.num_retired -= num_blocks
        while entries and (num_blocks or not entries[0][1]):
            num = min(num_blocks, entries[0][1])
            entries[0][1] -= num
            num_blocks -= int(num)
            if not entries[0][1]:
                entries.popleft()

    def _num_free(self) -> int:
        return NUM_BLOCKS - self.num_used - self.num_retired


class Simulation:
    """Engines, their pool and its line, from second 0 on."""

    def __init__(self, engines: list[Engine], config: AdmissionConfig) -> None:
        self.engines = engines
        self.now_s = 0.0
        self.waits_s: list[float] = []
        self.num_good = self.num_computed = self.num_recomputed = 0
        self.num_cut = self.num_yielded = self.num_ended = 0
        self.hostile_block_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._ids = itertools.count(), itertools.count(1)
        self._by_session: dict[int, Engine] = {}
        self.blocks = Blocks(lambda session: self._by_session[session].live)
        self.line = Line(self.blocks, config)
        for engine in engines:
            self._open(engine)
            self._at(random.random() * 0.5, self._ask, engine)
        self._at(TICK_S, self._tick)

    def run(self, duration_s: float) -> Simulation:
        while self._events[0][0] < duration_s:
            self.now_s, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        for engine in self.engines:
            request = engine.asked
            if engine.kind == "honest" and request and not request.admitted:
                self.waits_s.append(duration_s - (request.asked_s or 0.0))
        return self

    def _at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), call, arguments))

    def _open(self, engine: Engine) -> None:
        engine.session = next(self._ids)
        self._by_session[engine.session] = engine
        self.line.open(engine.session)

    # Engines

    def _ask(self, engine: Engine) -> None:
        if len(engine.live) == NUM_SEQUENCES:
            return
        if engine.asked is None:
            engine.asked = engine.again.popleft() if engine.again else engine.new_request()
            engine.asked_id = next(self._ids)
            if engine.asked.asked_s is None:
                engine.asked.asked_s = self.now_s
        num_needed = self.blocks.num_needed(engine.asked, self.blocks.hits(engine.asked))
        stands = engine.kind != "polling"
        place = self.line.admit(
            engine.session, engine.asked_id, num_needed, self.now_s, wait=stands
        )
        if place is None:
            self._admit(engine)
        elif not stands:
            self._at(self.now_s + POLL_S, self._ask, engine)

    def _admit(self, engine: Engine) -> None:
        request = engine.asked
        assert request is not None
        hits = self.blocks.hits(request)
        num_needed = self.blocks.num_needed(request, hits)
        num_own = -(-request.num_tokens // BLOCK_TOKENS) - CHUNK_BLOCKS * len(hits)
        live = Live(engine, engine.asked_id, request, hits, num_own, self.now_s)
        self.blocks.refer(hits)
        self.blocks.take(engine.session, num_needed)
        engine.live[live.id] = live
        engine.asked = None
        self.line.started(engine.session, live.id, self.now_s)
        engine.admitted_s.append(self.now_s)
        if not request.admitted and engine.kind == "honest":
            self.waits_s.append(self.now_s - (request.asked_s or 0.0))
        request.admitted = True
        num_tokens = request.num_tokens - CHUNK_TOKENS * len(hits)
        self.num_computed += num_tokens
        num_seen = min(request.num_seen, request.num_tokens)
        self.num_recomputed += max(0, num_seen - CHUNK_TOKENS * len(hits))
        engine.gpu_free_s = max(engine.gpu_free_s, self.now_s) + num_tokens / PREFILL_TOKENS_PER_S
        self._at(engine.gpu_free_s, self._prefilled, live)
        self._at(self.now_s, self._ask, engine)

    def _prefilled(self, live: Live) -> None:
        if live.gone:
            return
        request = live.request
        live.prefilled, live.progress_s = True, self.now_s
        request.num_seen = max(request.num_seen, request.num_tokens)
        for chunk in request.ids[len(live.chunks) : request.num_prompt // CHUNK_TOKENS]:
            if chunk in self.blocks.references:
                break
            self.blocks.references[chunk] = 1
            live.chunks.append(chunk)
            live.num_own -= CHUNK_BLOCKS
        if live.engine.kind != "idle":
            self._at(self.now_s + DECODE_BLOCK_S, self._decoded, live)

    def _decoded(self, live: Live) -> None:
        """A block was filled: the sequence ends, or needs another."""
        if live.gone:
            return
        engine, request = live.engine, live.request
        live.progress_s = self.now_s
        request.num_made += BLOCK_TOKENS
        request.num_seen = max(request.num_seen, request.num_tokens)
        self.num_computed += BLOCK_TOKENS
        if request.num_made >= request.num_output:
            if engine.kind == "honest":
                self.num_good += request.num_prompt + request.num_output
            self.line.ended(engine.session, live.id)
            self._drop(live)
            self._ask(engine)
        elif self.line.may_grow(engine.session, live.id, 1, self.now_s):
            self._grow(live, 1)

    def _grow(self, live: Live, num_blocks: int) -> None:
        self.blocks.take(live.engine.session, num_blocks)
        live.num_own += num_blocks
        live.progress_s = self.now_s
        self._at(self.now_s + DECODE_BLOCK_S, self._decoded, live)

    def _drop(self, live: Live) -> None:
        engine = live.engine
        live.gone = True
        del engine.live[live.id]
        entry = self.blocks.release(live, self.now_s)
        if engine.kind != "silent":
            self._at(self.now_s + RECEIPT_S, self._receipt, engine.session, entry)

    def _receipt(self, session: int, entry: list[float]) -> None:
        self.blocks.receipt(session, entry)
        self._serve()

    def _again(self, live: Live) -> None:
        """What was cut or given up is asked for again, before other requests."""
        self._drop(live)
        live.engine.again.append(live.request)
        self._at(self.now_s, self._ask, live.engine)

    # The control plane

    def _serve(self) -> None:
        while (grant := self.line.next_grant(self.now_s)) is not None:
            engine = self._by_session[grant.session]
            if isinstance(grant, Growth):
                self._grow(engine.live[grant.sequence], grant.num_blocks)
                continue
            request = engine.asked
            assert request is not None
            num = self.blocks.num_needed(request, self.blocks.hits(request))
            place = None
            if num > grant.num_blocks:  # what it had found cached was evicted
                place = self.line.admit(engine.session, grant.sequence, num, self.now_s, wait=True)
            if place is None:
                self._admit(engine)

    def _tick(self) -> None:
        for decision in self.line.tick(self.now_s):
            engine = self._by_session[decision.session]
            match decision:
                case Pressure(session=session, sequence=id_):
                    if engine.kind == "honest":
                        self.num_yielded += 1
                        self.line.ended(session, id_)
                        self._again(engine.live[id_])
                case Cut(sequence=id_):
                    self.num_cut += 1
                    self._again(engine.live[id_])
                case EndSession():
                    self.num_ended += 1
                    self._end(engine)
        self._serve()
        hostile = (live for e in self.engines if e.kind != "honest" for live in e.live.values())
        self.hostile_block_s += TICK_S * sum(live.num_own for live in hostile)
        self._at(self.now_s + TICK_S, self._tick)

    def _end(self, engine: Engine) -> None:
        session = engine.session
        self.line.close(session)
        for live in list(engine.live.values()):
            self._again(live)
        engine.asked = None
        self._at(self.now_s + RECEIPT_S, self._fenced, session)
        self._open(engine)

    def _fenced(self, session: int) -> None:
        self.blocks.fenced(session)
        self._serve()


def requests(kind: str, trace: Iterator[dict[str, Any]]) -> Callable[[], Request]:
    """What an engine asks for, one request after another."""
    if kind == "idle":
        return lambda: Request([], 32_000, 10**6)
    if kind == "greedy":
        return lambda: Request([], 8_000, 10**6)

    def next_request() -> Request:
        row = next(trace)
        return Request(row["hash_ids"], row["input_length"], row["output_length"])

    return next_request


def measure(
    name: str, rows: list[dict[str, Any]], *, seed: int, duration_s: float, config: AdmissionConfig
) -> dict[str, float]:
    """The figures of one case."""
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


def quantile(ordered: list[float], share: float) -> float:
    """A quantile by the nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def print_table(results: dict[str, list[dict[str, float]]]) -> None:
    """One line for each case, with the mean over its seeds."""
    print(
        f"{'':22}{'goodput':>9}{'of normal':>10}{'served':>10}{'wait p50':>9}{'p99':>7}"
        f"{'recomputed':>11}{'hostile':>9}{'yields':>8}{'cuts':>6}{'ends':>6}"
    )
    for name, runs in results.items():
        row = mean(runs)
        normal = mean(results[NORMAL])["goodput_tokens_per_s"] if NORMAL in results else None
        ratio = f"{row['goodput_tokens_per_s'] / normal:.2f}" if normal else "-"
        served = f"{row['num_served']:.0f}/{row['num_engines']:.0f}"
        print(
            f"{name:22}{row['goodput_tokens_per_s']:>9,.0f}{ratio:>10}{served:>10}"
            f"{row['wait_p50_s']:>9.1f}{row['wait_p99_s']:>7.1f}{row['recomputed']:>11.1%}"
            f"{row['hostile_share']:>9.1%}{row['num_yielded']:>8.0f}{row['num_cut']:>6.0f}"
            f"{row['num_ended']:>6.0f}"
        )


def mean(runs: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure."""
    return {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}


def main() -> None:
    """Simulate, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Simulate engines that share a pool.")
    parser.add_argument("--trace", type=Path, required=True, help="requests, one JSON a line")
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case")
    parser.add_argument("--duration-s", type=float, default=200.0, help="simulated seconds")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/admission.json"))
    for setting in dataclasses.fields(AdmissionConfig):
        kind = type(setting.default)
        parser.add_argument(
            f"--{setting.name.replace('_', '-')}", type=kind, default=setting.default
        )
    arguments = vars(parser.parse_args())
    names = [setting.name for setting in dataclasses.fields(AdmissionConfig)]
    config = AdmissionConfig(**{name: arguments[name] for name in names})
    rows = [json.loads(line) for line in arguments["trace"].read_text().splitlines()]
    results = {
        name: [
            measure(name, rows, seed=seed, duration_s=arguments["duration_s"], config=config)
            for seed in range(arguments["seeds"])
        ]
        for name in arguments["case"] or CASES
    }
    print_table(results)
    saved: Path = arguments["json"]
    saved.parent.mkdir(parents=True, exist_ok=True)
    saved.write_text(json.dumps({"config": dataclasses.asdict(config), "rows": results}, indent=2))
    print(f"saved to {saved}")


if __name__ == "__main__":
    main()
