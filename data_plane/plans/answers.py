"""What an executor answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class StartedPlan:
    """A plan that was started, now or before. ``receipt`` when there is nothing left to run;
    ``had_run`` when that was so before it was shown.
    """

    number: int
    num_tokens: int
    num_spans: int
    receipt: pb.SignedPayload | None = None
    had_run: bool = False
