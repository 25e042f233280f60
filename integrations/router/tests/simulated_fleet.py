"""Engines in simulated time, each with a pool of its own, managed by a control plane's core.

An engine computes prompts one after another at a constant rate. Once a prompt is computed, its
first token arrives, its blocks are published, and the pool's followers are notified.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from benchmarks.replay.cache import BLOCK_SIZE_TOKENS, Cache, Prompts
from benchmarks.replay.traces import BLOCK_TOKENS, Request
from kvplane.integrations.router.picker import HIT_BIAS, Pick, Picker
from kvplane.integrations.router.pool_index import PoolIndex
from kvplane.prefixes import PrefixEvent

PREFILL_TOKENS_PER_S = 8000.0
FEED_LAG_S = 0.1
"""From a change of an index to when the router knows of it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request. ``num_hits`` of its ``num_blocks`` were cached."""

    engine: int
    num_blocks: int
    num_hits: int
    first_token_s: float


class Fleet:
    """Engines behind a router that follows a policy: "seconds", the router's own, "round-robin", or
    "longest-prefix", the first engine that has most of the prompt.
    """

    def __init__(self, policy: str, num_engines: int, capacity_blocks: int) -> None:
        self._policy = policy
        self._prompts = Prompts()
        self._names = [str(i) for i in range(num_engines)]
        self._pools = [Cache(capacity_blocks, "lru", self._prompts) for _ in self._names]
        self._free_s = [0.0] * num_engines
        self._turn = 0
        scale = BLOCK_SIZE_TOKENS / BLOCK_TOKENS  # tokens of the index in one of the trace
        self._picker = Picker(
            dict(zip(self._names, self._names, strict=True)),
            hit_bias=HIT_BIAS,
            tokens_per_s=PREFILL_TOKENS_PER_S / 2 * scale,  # half of the true rate, to be learnt
        )
        self._picker.indexes = {each: PoolIndex(BLOCK_SIZE_TOKENS) for each in self._names}
        # Pending notices to the router: time, order, engine, number of a first token, changes.
        self._news: list[tuple[float, int, int, int, Sequence[PrefixEvent]]] = []
        self._num_news = 0
        for engine, pool in enumerate(self._pools):
            pool.follow()
            self._apply(engine, pool.changes())

    def send(self, request: Request) -> Outcome:
        """Send a request, when it is due, to the engine that the policy picks."""
        now_s = request.time_s
        while self._news and self._news[0][0] <= now_s:
            at_s, _, engine, number, events = heappop(self._news)
            if number >= 0:
                load = self._picker.loads[self._names[engine]]
                load.answered(number, at_s)
                load.ended(number)  # generation takes no time here
            self._apply(engine, events)
        pick = self._pick(array("i", self._prompts.tokens(request.ids)), now_s)
        engine, number = int(pick.engine), self._picker.sent(pick, now_s, is_told=True)
        # Nothing else happens to the pool while a prompt is computed: it may as well happen now.
        pool, begins_s = self._pools[engine], max(now_s, self._free_s[engine])
        num_hits = pool.run(begins_s, request.ids)
        num_computed = (len(request.ids) - num_hits) * BLOCK_TOKENS
        done_s = self._free_s[engine] = begins_s + num_computed / PREFILL_TOKENS_PER_S
        self._tell(done_s, engine, number, ())
        self._tell(done_s + FEED_LAG_S, engine, -1, pool.changes())
        return Outcome(engine, len(request.ids), num_hits, done_s - now_s)

    def _apply(self, engine: int, events: Sequence[PrefixEvent]) -> None:
        for event in events:
            self._picker.indexes[self._names[engine]].apply(event)

    def _tell(self, at_s: float, engine: int, number: int, events: Sequence[PrefixEvent]) -> None:
        heappush(self._news, (at_s, self._num_news, engine, number, events))
        self._num_news += 1

    def _pick(self, prompt: Sequence[int], now_s: float) -> Pick:
        if self._policy == "seconds":
            pick = self._picker.pick([prompt], now_s)
            assert pick is not None, "there are no engines"
            return pick
        cached = {
            each: self._picker.indexes[each].num_cached_tokens(prompt) for each in self._names
        }
        name = max(self._names, key=lambda each: cached[each])
        if self._policy == "round-robin":
            name = self._names[self._turn % len(self._names)]
            self._turn += 1
        return Pick(name, cached[name], len(prompt) - cached[name], 0.0)
