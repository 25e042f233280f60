"""What an executor answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.v1 import control_pb2
from kvplane.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class StartedPlan:
    """A plan that was started, now or before. ``receipt`` when there is nothing left to run;
    ``had_run`` when that was so before it was shown.
    """

    number: int
    num_tokens: int
    num_rows: int
    receipt: pb.SignedPayload | None = None
    had_run: bool = False


@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """What a control plane must know of the blocks before it plans for them."""

    blocks: list[control_pb2.ReportedBlock]
    max_session_id: int
