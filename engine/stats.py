"""Totals of an engine. They never fall."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_LATENCIES = 100_000


@dataclass(slots=True)
class EngineStats:
    """Counters and totals of an engine since it was made."""

    num_requests: int = 0
    num_failed_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_swap_preemptions: int = 0
    num_recompute_preemptions: int = 0
    num_forks: int = 0
    num_aborted_plans: int = 0
    num_reopened_sessions: int = 0
    step_latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))

    @property
    def num_preemptions(self) -> int:
        """Number of sequences whose device blocks were taken, by swap or recompute."""
        return self.num_swap_preemptions + self.num_recompute_preemptions

    def note_step(self, seconds: float, num_tokens: int) -> None:
        """Record a step that computed ``num_tokens`` tokens in ``seconds``."""
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.step_latencies_s.append(seconds)

    def step_latency_s(self, quantile: float) -> float:
        """Return a quantile (0 to 1) of steps' seconds, by the nearest rank; 0 without steps."""
        ordered = sorted(self.step_latencies_s)
        if not ordered:
            return 0.0
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
