"""Engines, their pool and its queue, second by second."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any, Final

from control_plane.admission.decisions import (
    AdmissionConfig,
    Cut,
    EndSession,
    Growth,
    Pressure,
)
from control_plane.admission.queue import AdmissionQueue
from tests.helpers.admission_load.pool import (
    BLOCK_TOKENS,
    CHUNK_BLOCKS,
    CHUNK_TOKENS,
    Blocks,
    Engine,
    Live,
)

DECODE_BLOCK_S: Final = 0.32
PREFILL_TOKENS_PER_S: Final = 10_000.0
RECEIPT_S: Final = 0.03
POLL_S: Final = 0.03
TICK_S: Final = 0.25
NUM_SEQUENCES: Final = 4
JUMP_BLOCKS: Final = 30_000


class Simulation:
    """Engines, their pool and its queue, from second 0 on."""

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
        self.queue = AdmissionQueue(self.blocks, config)
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
        self.queue.open(engine.session)

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
        must_wait = self.queue.admit(
            engine.session, engine.asked_id, num_needed, self.now_s, wait=stands
        )
        if must_wait is None:
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
        self.queue.started(engine.session, live.id, self.now_s)
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
        if live.engine.kind == "jumping":
            if self.queue.may_grow(live.engine.session, live.id, JUMP_BLOCKS, self.now_s):
                self._grow(live, JUMP_BLOCKS)
        elif live.engine.kind != "idle":
            self._at(self.now_s + DECODE_BLOCK_S, self._decoded, live)

    def _decoded(self, live: Live) -> None:
        """Note a filled block: the sequence ends, or needs another."""
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
            self.queue.ended(engine.session, live.id)
            self._drop(live)
            self._ask(engine)
        elif self.queue.may_grow(engine.session, live.id, 1, self.now_s):
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
        """Ask again for a sequence that was cut or given up, before the engine's other requests."""
        self._drop(live)
        live.engine.again.append(live.request)
        self._at(self.now_s, self._ask, live.engine)

    # The control plane

    def _serve(self) -> None:
        while (grant := self.queue.next_grant(self.now_s)) is not None:
            engine = self._by_session[grant.session]
            if isinstance(grant, Growth):
                self._grow(engine.live[grant.sequence], grant.num_blocks)
                continue
            request = engine.asked
            assert request is not None
            num = self.blocks.num_needed(request, self.blocks.hits(request))
            must_wait = None
            if num > grant.num_blocks:  # cached chunks that it had found were evicted
                must_wait = self.queue.admit(
                    engine.session, grant.sequence, num, self.now_s, wait=True
                )
            if must_wait is None:
                self._admit(engine)

    def _tick(self) -> None:
        for decision in self.queue.tick(self.now_s):
            engine = self._by_session[decision.session]
            match decision:
                case Pressure(session=session, sequence=id_):
                    if engine.kind == "honest":
                        self.num_yielded += 1
                        self.queue.ended(session, id_)
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
        self.queue.close(session)
        for live in list(engine.live.values()):
            self._again(live)
        engine.asked = None
        self._at(self.now_s + RECEIPT_S, self._fenced, session)
        self._open(engine)

    def _fenced(self, session: int) -> None:
        self.blocks.fenced(session)
        self._serve()
