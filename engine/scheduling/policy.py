"""Who goes first. The scheduler asks a policy for nothing but an order; a smaller key goes first
and is preempted last.
"""

from __future__ import annotations

from typing import Protocol

from .sequence import EngineSequence


class Policy(Protocol):
    """An order over sequences. It must be total and must not change while a sequence lives, or two
    could preempt each other for ever. Continuations of one request should be neighbours.
    """

    def key(self, sequence: EngineSequence) -> tuple[int, ...]:
        """The sort key of ``sequence``."""
        ...


class PriorityThenArrival:
    """Requests of a lower priority, and of equal ones those that came first."""

    def key(self, sequence: EngineSequence) -> tuple[int, ...]:
        """Priority, arrival, then the continuation's index."""
        return sequence.place
