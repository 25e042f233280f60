"""Engines in simulated time, each with a pool of its own, managed by a control plane's core.

An engine computes prompts one after another at a constant rate. Once a prompt is computed, its
first token arrives, its blocks are published, and the pool's followers are notified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from benchmarks.replay.cache import Cache, Prompts
from benchmarks.replay.traces import Request
from kvplane.prefixes import PrefixEvent


@dataclass(frozen=True, slots=True)
class Shape:
    """A fleet. Blocks and tokens are those of the trace. ``feed_lag_s``: from a change of an index
    to when the router knows of it.
    """

    num_engines: int = 8
    capacity_blocks: int = 3000
    block_tokens: int = 512
    prefill_tokens_per_s: float = 8000.0
    feed_lag_s: float = 0.1


class Router(Protocol):
    """Places requests on engines 0, 1, ..."""

    def place(self, request: Request, now_s: float) -> tuple[int, int]:
        """Return the engine for a request, and a number for ``answered``."""

    def answered(self, engine: int, number: int, now_s: float) -> None:
        """Note a request's first token."""

    def changed(self, engine: int, events: Sequence[PrefixEvent]) -> None:
        """Note a change of the index of the engine's pool."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request. ``num_hits`` of its ``num_blocks`` were cached."""

    engine: int
    num_blocks: int
    num_hits: int
    first_token_s: float


class Fleet:
    """The engines, idle and empty at first. ``prompts``: the tokens that they are sent."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.prompts = Prompts()
        self._pools = [
            Cache(shape.capacity_blocks, "lru", self.prompts) for _ in range(shape.num_engines)
        ]
        for pool in self._pools:
            pool.follow()
        self._free_s = [0.0] * shape.num_engines
        # Pending notices to the router: time, order, call.
        self._news: list[tuple[float, int, int, int, Sequence[PrefixEvent]]] = []
        self._num_news = 0

    def run(self, requests: Sequence[Request], router: Router) -> list[Outcome]:
        """Send each request, when it is due, to the engine that the router picks."""
        for engine, pool in enumerate(self._pools):
            router.changed(engine, pool.changes())
        return [self._send(request, router) for request in requests]

    def _send(self, request: Request, router: Router) -> Outcome:
        now_s = request.time_s
        while self._news and self._news[0][0] <= now_s:
            at_s, _, engine, number, events = heappop(self._news)
            if number >= 0:
                router.answered(engine, number, at_s)
            if events:
                router.changed(engine, events)
        engine, number = router.place(request, now_s)
        assert number >= 0, number
        # Nothing else happens to the pool while a prompt is computed: it may as well happen now.
        pool, begins_s = self._pools[engine], max(now_s, self._free_s[engine])
        num_hits = pool.run(begins_s, request.ids)
        num_computed = (len(request.ids) - num_hits) * self._shape.block_tokens
        done_s = begins_s + num_computed / self._shape.prefill_tokens_per_s
        self._free_s[engine] = done_s
        self._tell(done_s, engine, number, ())
        self._tell(done_s + self._shape.feed_lag_s, engine, -1, pool.changes())
        return Outcome(engine, len(request.ids), num_hits, done_s - now_s)

    def _tell(self, at_s: float, engine: int, number: int, events: Sequence[PrefixEvent]) -> None:
        heappush(self._news, (at_s, self._num_news, engine, number, events))
        self._num_news += 1
