"""A plan from its asking on. It is carried out at once, or in passes, which compute one token of
each of its spans each. The token that a pass gives is what the next one computes: the control plane
is asked once for several steps of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvplane.results import StepResult
from kvplane.sync.loop_thread import Pending
from kvplane.v1 import types_pb2 as types

from ..scheduling.intents import Intent, Span


@dataclass(frozen=True, slots=True)
class Asked:
    """A step that was sent to the control plane."""

    intents: list[Intent]
    answer: Pending[StepResult]
    span: Any
    """In which the step is traced."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What is to be computed next of a plan. ``index``: None where that is all of it."""

    plan: types.SignedPayload
    plan_spans: Sequence[Span]
    index: int | None

    @property
    def spans(self) -> Sequence[Span]:
        """Those of the pass. Of a sequence that has ended since, the token is not known."""
        index = self.index
        if index is None:
            return self.plan_spans
        return [
            replace(span, first_position=span.first_position + index, num_tokens=1, is_last=True)
            for span in self.plan_spans
            if span.num_tokens > index
        ]

    @property
    def num_left(self) -> int:
        """Passes of the plan after this one."""
        if self.index is None:
            return 0
        return max(span.num_tokens for span in self.plan_spans) - self.index - 1

    @property
    def following(self) -> Pass | None:
        """The next pass; None after the last."""
        if self.index is None or not self.num_left:
            return None
        return replace(self, index=self.index + 1)
