"""Measures the parts of an embedded engine's step, and the service's share: all but the model's own
work and the kernels that write and attend.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from engine import LLM

# Parts of a step, by the methods that do them. Model and layer calls are separated below.
_METHODS: Final = {
    "ask for the next plan": ("_core", "_ask"),
    "wait for a plan, apply it": ("_core", "_take_answer"),
    "start the plan": ("_backend", "start"),
    "receipt": ("_backend", "finish"),
    "sample": ("_core", "_sample"),
    "run": ("_runner", "run"),
    "layers": ("_backend", "layer"),
}
OURS: Final = ("model", "kernels")


class StepTimes:
    """Times the steps of ``llm``, whose data plane is in this process. Costs microseconds."""

    def __init__(self, llm: LLM) -> None:
        core: Any = llm._core
        of = {"_core": core, "_backend": core._backend, "_runner": core._runner}
        self._counters = core._backend._executor.counters
        self._stats = llm.stats
        self._steps: list[tuple[int, dict[str, float]]] = []  # tokens, seconds by part
        self._present = Counter[str]()
        for part, (name, *methods) in _METHODS.items():
            for method in methods:
                setattr(of[name], method, self._timed(getattr(of[name], method), part))
        core.step = self._timed_step(core.step)

    def take(self, num_tokens: int) -> dict[str, float]:
        """Return the mean seconds of each part, and of all, over the steps since the last call that
        computed that many tokens. Not medians: one step of several asks for a plan.
        """
        steps = [parts for num, parts in self._steps if num == num_tokens]
        self._steps.clear()
        return {part: statistics.fmean(step[part] for step in steps) for part in steps[0]}

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self._present[part] += time.perf_counter() - began_s  # type: ignore[assignment]

        return timed

    def _timed_step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            self._present.clear()
            num_before = self._stats.num_computed_tokens
            kernels_s = sum(self._counters.kernel_s.values())
            began_s = time.perf_counter()
            result = step()
            wall_s = time.perf_counter() - began_s
            kernels_s = sum(self._counters.kernel_s.values()) - kernels_s
            parts: dict[str, float] = dict.fromkeys(_METHODS, 0.0) | self._present
            layers_s = parts.pop("layers")
            parts |= {
                "model": parts.pop("run") - layers_s,
                "kernels": kernels_s,
                "layer calls": layers_s - kernels_s,
            }
            parts["the rest"] = wall_s - sum(parts.values())
            num = self._stats.num_computed_tokens - num_before
            self._steps.append((num, parts | {"all": wall_s}))
            return result

        return timed


def service_share(parts: dict[str, float]) -> float:
    """Return the service's share of a step, which ``StepTimes.take`` returned."""
    return 1 - sum(parts[name] for name in OURS) / parts["all"]
