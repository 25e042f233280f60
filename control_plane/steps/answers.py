"""Answers to steps, from their parts: encoded once, with one copy of the plan's bytes.

A message would copy the plan when it is set, and twice more when it is encoded. Where new pages
must first be mapped, each copy of a large plan takes as long as hashing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from control_plane.sessions.session import Session
from control_plane.steps.operation import Named
from kvplane.wire.v1 import session_pb2 as cpb


class SignedPlan(NamedTuple):
    """A step's plan: its encoded bytes, and their signature."""

    payload: bytes
    signature: bytes


class StepAnswer(NamedTuple):
    """The answer to a step. ``encoded``: a StreamStepsResponse, with a StepResponse from
    ``step_at`` to its end. ``operations``: those that it answers, and ``results``: theirs; both are
    empty in a repeated answer. ``has_plan``: whether a plan was made for it. ``settle`` does what
    can wait until the answer is sent.
    """

    encoded: bytes
    step_at: int
    operations: Sequence[Named] = ()
    results: Sequence[cpb.OperationResult] = ()
    has_plan: bool = False
    settle: Callable[[], None] = lambda: None

    @property
    def step(self) -> bytes:
        """The encoded StepResponse, without the StreamStepsResponse around it."""
        return self.encoded[self.step_at :]


def step_answer(
    session: Session,
    number: int,
    operations: Sequence[Named],
    result: cpb.StepResponse,
    plan: SignedPlan | None,
    news: cpb.News | None,
) -> StepAnswer:
    """Build the answer to a step, with the pool's usage and revision as they are now. ``result``:
    the results of the operations alone.
    """
    pool = session.pool
    payload, signature = plan or (b"", b"")
    encoded, step_at = session.native.answer(
        number,
        result.SerializeToString(),
        payload,
        signature,
        pool.revision(),
        news.SerializeToString() if news is not None else b"",
    )
    return StepAnswer(
        encoded, step_at, operations, result.results, plan is not None, session.settle
    )
