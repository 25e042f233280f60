"""Faults of checks, each of which answers otherwise than the step, or changes something.

Each takes pytest's monkeypatch and plants itself for one test.
"""

from __future__ import annotations

from typing import Any

import pytest

from control_plane import core
from control_plane.sessions.pool_admission import PoolAdmission
from control_plane.sessions.session import Session
from control_plane.steps.operations import OPERATIONS, Operation, Step


def the_queue_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """Who would have to wait behind others is told that it would be admitted."""

    def ask(self: PoolAdmission, *args: Any, check_as: int = 0, **how: Any) -> Any:
        return None if check_as else original(self, *args, **how)

    original = PoolAdmission._ask
    patch.setattr(PoolAdmission, "_ask", ask)


def blocked_growth_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """A growth that would have to wait behind an older one is told that it may have blocks."""

    def may_grow(self: PoolAdmission, session: Session, *args: Any) -> bool:
        return args[-1] != 0 or original(self, session, *args)

    original = PoolAdmission.may_grow
    patch.setattr(PoolAdmission, "may_grow", may_grow)


def a_position_is_taken(patch: pytest.MonkeyPatch) -> None:
    """A check of an admission stands in the queue."""

    def ask(self: PoolAdmission, *args: Any, check_as: int = 0, **how: Any) -> Any:
        return original(self, *args, **how)

    original = PoolAdmission._ask
    patch.setattr(PoolAdmission, "_ask", ask)


def a_growth_waits(patch: pytest.MonkeyPatch) -> None:
    """A check of a growth has the sequence wait for blocks."""

    def may_grow(self: PoolAdmission, session: Session, *args: Any) -> bool:
        return original(self, session, *args[:-1], 0)

    original = PoolAdmission.may_grow
    patch.setattr(PoolAdmission, "may_grow", may_grow)


def _done_by_a_check(patch: pytest.MonkeyPatch, name: str) -> None:
    def run(step: Step, *args: Any) -> Any:
        before, step.check_as = step.check_as, 0
        failures = yield from original(step, *args)
        step.check_as = before
        return failures

    operation: Operation = OPERATIONS[name]
    original = operation.run
    patch.setattr(operation, "run", run)


def full_sessions_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """A check does not know that too many plans are in flight for the step."""
    patch.setattr(core, "check_no_plan", lambda session, operations: None)


FAULTS = (
    the_queue_is_ignored,
    blocked_growth_is_ignored,
    a_position_is_taken,
    a_growth_waits,
    full_sessions_are_ignored,
)
