"""The service's share of an embedded engine's step: all but the model's own work and the kernels
that write and attend.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from engine import LLM


class StepShares:
    """Times the steps of ``llm``, whose data plane is in this process. Costs microseconds."""

    def __init__(self, llm: LLM) -> None:
        core: Any = llm._core
        self._backend: Any = core._backend
        self._counters = self._backend._executor.counters
        self._steps: list[tuple[int, float, float]] = []  # tokens, wall and model seconds
        self._layers_s = 0.0
        self._model_s = 0.0
        core.step = self._timed_step(core.step, llm.stats)
        core._runner.run = self._timed_run(core._runner.run)
        self._backend.layer = self._timed_layer(self._backend.layer)

    def take(self, num_tokens: int) -> float:
        """The share of the steps so far that computed so many tokens, by medians; then they are
        forgotten.
        """
        steps = [step for step in self._steps if step[0] == num_tokens]
        self._steps.clear()
        walls_s, models_s = (statistics.median(step[i] for step in steps) for i in (1, 2))
        return 1 - models_s / walls_s

    def _timed_step(self, step: Callable[[], Any], stats: Any) -> Callable[[], Any]:
        def timed() -> Any:
            num_before = stats.num_computed_tokens
            self._model_s = 0.0
            began_s = time.perf_counter()
            result = step()
            wall_s = time.perf_counter() - began_s
            self._steps.append((stats.num_computed_tokens - num_before, wall_s, self._model_s))
            return result

        return timed

    def _timed_run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            kernels_s, self._layers_s = sum(self._counters.kernel_s.values()), 0.0
            began_s = time.perf_counter()
            logits = run(*arguments)
            self._model_s = time.perf_counter() - began_s - self._layers_s
            self._model_s += sum(self._counters.kernel_s.values()) - kernels_s
            return logits

        return timed

    def _timed_layer(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            out = layer(*arguments, **options)
            self._layers_s += time.perf_counter() - began_s
            return out

        return timed
