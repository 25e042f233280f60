"""Picks the engine that will have computed a prompt first.

    seconds = (1 - busy) ** hit_bias x seconds that the engine has yet to compute
              + uncached tokens / its rate

Prompts that are computed twice delay all requests until the engine is idle again: the busier the
engines, the more requests. So a hit counts for more than this request's own time, by the share of
engines that requests find ``busy``. A bias of 0 considers this request only. 1 is right where
requests come one by one (the work that one adds to an M/G/1 queue delays others by busy / (1 -
busy) times that work); real ones come in bursts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from .engine_load import EngineLoad
from .pool_index import PoolIndex

HIT_BIAS: Final = 1.5
TOKENS_PER_S: Final = 4000.0
# Weight of one request's observation in the share of busy engines.
_GAIN: Final = 0.01
_BUSY_AT_FIRST: Final = 0.5
# Costs that differ by less are equal: the rates behind them are not more exact.
_EQUAL: Final = 0.05


@dataclass(frozen=True, slots=True)
class Pick:
    """An engine for a prompt. ``cost_s``: the weighted seconds by which it was chosen."""

    engine: str
    num_cached_tokens: int
    num_uncached_tokens: int
    cost_s: float


class Picker:
    """Chooses among engines. ``pool_of``: the pool of each, by name. ``indexes``: of followed
    pools; other pools count as empty. ``lost``: pools that no session can be opened on now; unless
    ``needs_pools``, engines answer without them.

    ``tokens_per_s``: rate of an engine until its own is known.
    """

    def __init__(
        self,
        pool_of: Mapping[str, str],
        *,
        hit_bias: float = HIT_BIAS,
        tokens_per_s: float = TOKENS_PER_S,
        needs_pools: bool = True,
    ) -> None:
        self.indexes: dict[str, PoolIndex] = {}
        self.lost: set[str] = set()
        self.loads = {engine: EngineLoad(tokens_per_s) for engine in pool_of}
        self.pool_of = dict(pool_of)
        self._hit_bias = hit_bias
        self._needs_pools = needs_pools
        self._busy = _BUSY_AT_FIRST
        self._turn = count()
        self._last_turn = dict.fromkeys(pool_of, -1)
        self._numbers = count()

    def pick(
        self,
        prompts: Sequence[Sequence[int]],
        now_s: float,
        *,
        num_unread_tokens: int = 0,
        among: Collection[str] | None = None,
    ) -> Pick | None:
        """Return the engine for a request's prompts, of those ``among``, or of all; None when there
        is none. ``num_unread_tokens``: more tokens, not known to be cached. An engine of a lost
        pool is picked only if there is no other; or, if it answers without it, as one of an empty
        pool.

        Of nearly equal engines, picks the one with the fewest open requests, then the one not
        picked for longest.
        """
        engines = self._usable(self.loads.keys() if among is None else among)
        if not engines:
            return None
        waits_s = {engine: self.loads[engine].wait_s(now_s) for engine in engines}
        self._busy += _GAIN * (sum(map(bool, waits_s.values())) / len(waits_s) - self._busy)
        weight = (1 - self._busy) ** self._hit_bias
        num_tokens = num_unread_tokens + sum(map(len, prompts))
        unknown = set() if self._needs_pools else self.lost
        cached = {
            pool: sum(map(self.indexes[pool].num_cached_tokens, prompts))
            for pool in {self.pool_of[engine] for engine in waits_s} - unknown
            if pool in self.indexes
        }
        picks = []
        for engine, wait_s in waits_s.items():
            num_cached = cached.get(self.pool_of[engine], 0)
            compute_s = (num_tokens - num_cached) / self.loads[engine].tokens_per_s
            cost_s = weight * wait_s + compute_s
            picks.append(Pick(engine, num_cached, num_tokens - num_cached, cost_s))
        enough_s = min(pick.cost_s for pick in picks) * (1 + _EQUAL)
        best = min(
            (pick for pick in picks if pick.cost_s <= enough_s),
            key=lambda pick: (self.loads[pick.engine].num_open, self._last_turn[pick.engine]),
        )
        self._last_turn[best.engine] = next(self._turn)
        return best

    def _usable(self, among: Collection[str]) -> list[str]:
        """Return the engines among these whose pools are not lost, or all if there are none, or if
        engines answer without their pools.
        """
        engines = [engine for engine in self.loads if engine in among]
        lost = self.lost if self._needs_pools else ()
        usable = [engine for engine in engines if self.pool_of[engine] not in lost]
        return usable or engines

    def sent(self, pick: Pick, now_s: float, *, is_told: bool) -> int:
        """Note that the prompt was sent to the picked engine. Return a number for the load's
        ``answered`` and ``ended``.
        """
        number = next(self._numbers)
        self.loads[pick.engine].sent(number, pick.num_uncached_tokens, now_s, is_told=is_told)
        return number
