"""What an executor returns for a plan."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class StartedPlan:
    """A plan that was started, now or before. ``receipt``: there once the plan has run.
    ``had_run``: whether it had run before this call.
    """

    number: int
    num_tokens: int
    num_spans: int
    receipt: pb.SignedPayload | None = None
    had_run: bool = False
