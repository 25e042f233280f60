"""Estimates how long a prompt would wait at an engine, and how fast it computes prompts.

An engine is modelled as a queue: it computes prompts in the order in which they were sent, at a
rate that is learnt from the times of their first bytes.

    sent A, B, C          first byte of A        first byte of B
    ──┬───────────────────────┬──────────────────────┬─────────►
      └──── A is computed ────┘──── B is computed ───┘

An engine that computes several at once answers in another order, and gives the same rate: all
computed tokens over all busy time.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

# A measurement counts half after this many seconds of computing.
_HALF_LIFE_S: Final = 20.0
# A first guess counts as much as a second of measurements.
_GUESS_S: Final = 1.0


@dataclass(slots=True)
class _Waiting:
    """A prompt without a first byte yet. ``is_told``: that will be reported, as in a stream."""

    num_tokens: int
    sent_s: float
    is_told: bool


class EngineLoad:
    """The load of one engine. Times are seconds of one clock that never goes back.

    ``tokens_per_s``: the rate until one was measured.
    """

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens = tokens_per_s * _GUESS_S
        self._seconds = _GUESS_S
        self._waiting: dict[int, _Waiting] = {}  # in the order in which they were sent
        self._num_waiting_tokens = 0
        self._since_s = 0.0  # when the engine began the first of them
        self.num_open = 0

    @property
    def tokens_per_s(self) -> float:
        """The rate at which prompts are computed."""
        return self._tokens / self._seconds

    def copied(self) -> EngineLoad:
        """Return a copy, whose methods change nothing here. Any thread may call this."""
        copied = copy(self)
        copied._waiting = self._waiting.copy()
        return copied

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the engine will have computed all sent prompts."""
        self._forget_overdue(now_s)
        first = next(iter(self._waiting.values()), None)
        if first is None:
            return 0.0
        done_s = min(first.num_tokens / self.tokens_per_s, now_s - self._begun_s(first))
        return self._num_waiting_tokens / self.tokens_per_s - done_s

    def sent(self, number: int, num_tokens: int, now_s: float, *, is_told: bool) -> None:
        """Note that request ``number`` was sent, with ``num_tokens`` to compute. ``is_told``:
        ``answered`` will be called when its prompt is computed, not only when the whole answer is.
        """
        self._forget_overdue(now_s)
        self.num_open += 1
        self._waiting[number] = _Waiting(num_tokens, now_s, is_told)
        self._num_waiting_tokens += num_tokens

    def answered(self, number: int, now_s: float) -> None:
        """Note the first byte of a request."""
        request = self._waiting.get(number)
        if request is None or not request.is_told:
            return
        begun_s = self._begun_s(next(iter(self._waiting.values())))
        earlier = takewhile(lambda other: other != number, self._waiting)
        # Earlier requests that were computed without a report.
        untold = [other for other in earlier if not self._waiting[other].is_told]
        num_tokens = sum(map(self._drop, [*untold, number]))
        took_s = max(0.0, now_s - begun_s)
        kept = 0.5 ** (took_s / _HALF_LIFE_S)
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + took_s
        self._since_s = now_s

    def ended(self, number: int) -> None:
        """Note that a request is over: answered in full, failed, or given up."""
        self.num_open -= 1
        if number in self._waiting:
            self._drop(number)

    def _forget_overdue(self, now_s: float) -> None:
        """Drop requests whose first byte is not reported, once their time has passed."""
        while self._waiting:
            number, first = next(iter(self._waiting.items()))
            takes_s = first.num_tokens / self.tokens_per_s
            begun_s = self._begun_s(first)
            if first.is_told or now_s - begun_s < takes_s:
                return
            self._drop(number)
            self._since_s = begun_s + takes_s

    def _begun_s(self, first: _Waiting) -> float:
        return max(first.sent_s, self._since_s)

    def _drop(self, number: int) -> int:
        num_tokens = self._waiting.pop(number).num_tokens
        self._num_waiting_tokens -= num_tokens
        return num_tokens
