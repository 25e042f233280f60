"""How long a prompt would wait at an engine, and how fast the engine computes prompts.

An engine is taken for a line: prompts are computed in the order in which they were sent, at a rate
that is learnt from when their first bytes came.

    sent A, B, C          first byte of A        first byte of B
    ──┬───────────────────────┬──────────────────────┬─────────►
      └──── A is computed ────┘──── B is computed ───┘

An engine that computes several at once answers in another order, and gives the same rate: all that
was computed over all the time in which something was.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Final

# What was measured counts half after as many seconds of computing.
_HALF_LIFE_S: Final = 20.0
# A first guess counts as much as a second of measurements.
_GUESS_S: Final = 1.0


@dataclass(slots=True)
class _Waiting:
    """A prompt of which no byte has come. ``is_told``: its first byte will be, as in a stream."""

    num_tokens: int
    sent_s: float
    is_told: bool


class EngineLoad:
    """The load of one engine. Times are seconds of one clock that never goes back.

    ``tokens_per_s``: what to believe before anything was measured.
    """

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens = tokens_per_s * _GUESS_S
        self._seconds = _GUESS_S
        self._waiting: dict[int, _Waiting] = {}  # in the order in which they were sent
        self._num_waiting_tokens = 0
        self._since_s = 0.0  # when the engine turned to the first of them
        self.num_open = 0

    @property
    def tokens_per_s(self) -> float:
        """The rate at which prompts are computed."""
        return self._tokens / self._seconds

    def wait_s(self, now_s: float) -> float:
        """Seconds until the engine will have computed all that was sent."""
        self._forget_overdue(now_s)
        first = next(iter(self._waiting.values()), None)
        if first is None:
            return 0.0
        done_s = min(first.num_tokens / self.tokens_per_s, now_s - self._begun_s(first))
        return self._num_waiting_tokens / self.tokens_per_s - done_s

    def sent(self, number: int, num_tokens: int, now_s: float, *, is_told: bool) -> None:
        """Request ``number`` was sent, of which ``num_tokens`` have to be computed. ``is_told``:
        ``answered`` will be called when its prompt is computed, not only when all is.
        """
        self._forget_overdue(now_s)
        self.num_open += 1
        self._waiting[number] = _Waiting(num_tokens, now_s, is_told)
        self._num_waiting_tokens += num_tokens

    def answered(self, number: int, now_s: float) -> None:
        """The first byte of a request came."""
        request = self._waiting.get(number)
        if request is None or not request.is_told:
            return
        begun_s = self._begun_s(next(iter(self._waiting.values())))
        earlier = takewhile(lambda other: other != number, self._waiting)
        # Those before it whose turn is over without anybody telling.
        untold = [other for other in earlier if not self._waiting[other].is_told]
        num_tokens = sum(map(self._drop, [*untold, number]))
        took_s = max(0.0, now_s - begun_s)
        kept = 0.5 ** (took_s / _HALF_LIFE_S)
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + took_s
        self._since_s = now_s

    def ended(self, number: int) -> None:
        """A request is over: answered in full, failed, or given up."""
        self.num_open -= 1
        if number in self._waiting:
            self._drop(number)

    def _forget_overdue(self, now_s: float) -> None:
        """Let those go whose first byte is not told, once their time has passed."""
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
