"""The check of a pool finds where a session and the native core disagree. What the core checks of
its own blocks is tested in ``tests/unit/blocks``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from control_plane.sessions.session import Session
from kvplane import ops
from tests.helpers.core.core_model import Engine, World


@pytest.fixture
def engine() -> Engine:
    """Plan 3 is in flight."""
    engine = World().engine()
    engine.admit(1, range(12))
    engine.step(ops.admit(2, range(200, 220)))
    engine.world.core.check_integrity()
    return engine


def _receipts(session: Session) -> None:
    session.receipted[0] += 1


def _ran(session: Session) -> None:
    session.plans[1] = session.plans.pop(3)


def _lost(session: Session) -> None:
    session.plans.clear()


def _made(session: Session) -> None:
    session.last_plan += 1


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_receipts, "receipts differ"),
        (_ran, "a plan that ran is in flight"),
        (_lost, "plans in flight differ"),
        (_made, "last plans differ"),
    ],
)
def test_it_finds(engine: Engine, plant: Callable[[Session], None], message: str) -> None:
    plant(engine.session)
    with pytest.raises(AssertionError, match=message):
        engine.world.core.check_integrity()


def test_two_sessions_of_one_handle_are_found(engine: Engine) -> None:
    engine.world.engine().session.handle = engine.session.handle
    with pytest.raises(AssertionError, match="one handle"):
        engine.world.core.check_integrity()
