"""Ways to place requests: kvplane's own, and others beside it.

| name | picks |
|---|---|
| round-robin | each engine in turn |
| least-loaded | the engine that has the least to compute |
| longest-prefix | the engine that has most of the prompt; of several the first |
| longest-prefix-least-loaded | the same, of several the one that has the least to compute |
| seconds:BIAS | ``kvplane.integrations.router.picker``, with that bias towards hits |
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from benchmarks.replay.cache import BLOCK_SIZE_TOKENS, Prompts
from benchmarks.replay.traces import Request
from kvplane.prefixes import PrefixEvent

from ..picker import Pick, Picker
from ..pool_index import PoolIndex
from .fleet import Shape

POLICIES = (
    *("round-robin", "least-loaded", "longest-prefix", "longest-prefix-least-loaded"),
    *("seconds:0", "seconds:1", "seconds:1.5", "seconds:2"),
)


class PolicyRouter:
    """Places by one of the policies, all of which see the data that kvplane's router sees."""

    def __init__(self, policy: str, shape: Shape, prompts: Prompts) -> None:
        self._policy, _, bias = policy.partition(":")
        self._engines = [str(i) for i in range(shape.num_engines)]
        scale = BLOCK_SIZE_TOKENS / shape.block_tokens  # tokens of the index in one of the trace
        self._picker = Picker(
            dict(zip(self._engines, self._engines, strict=True)),
            hit_bias=float(bias or 0),
            # Half of the true rate, which has to be learnt.
            tokens_per_s=shape.prefill_tokens_per_s / 2 * scale,
        )
        self._picker.indexes = {each: PoolIndex(BLOCK_SIZE_TOKENS) for each in self._engines}
        self._prompts = prompts
        self._turn = 0

    def place(self, request: Request, now_s: float) -> tuple[int, int]:
        """Return the engine, and the number of the request."""
        prompt = array("i", self._prompts.tokens(request.ids))
        pick = self._pick(prompt, now_s)
        return int(pick.engine), self._picker.sent(pick, now_s, is_told=True)

    def answered(self, engine: int, number: int, now_s: float) -> None:
        """Note it for the policy."""
        load = self._picker.loads[self._engines[engine]]
        load.answered(number, now_s)
        load.ended(number)  # generation takes no time here

    def changed(self, engine: int, events: Sequence[PrefixEvent]) -> None:
        """Apply the change to the index."""
        for event in events:
            self._picker.indexes[self._engines[engine]].apply(event)

    def _pick(self, prompt: Sequence[int], now_s: float) -> Pick:
        if self._policy == "seconds":
            pick = self._picker.pick([prompt], now_s)
            assert pick is not None, "there are no engines"
            return pick
        names = self._engines
        waits_s = {each: self._picker.loads[each].wait_s(now_s) for each in names}
        cached = {each: self._picker.indexes[each].num_cached_tokens(prompt) for each in names}
        if self._policy == "round-robin":
            name = names[self._turn % len(names)]
            self._turn += 1
        elif self._policy == "least-loaded":
            name = min(names, key=lambda each: waits_s[each])
        elif self._policy == "longest-prefix":
            name = max(names, key=lambda each: cached[each])
        else:
            name = max(names, key=lambda each: (cached[each], -waits_s[each]))
        return Pick(name, cached[name], len(prompt) - cached[name], 0.0)
