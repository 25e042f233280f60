"""The check of a pool finds where a session and the native core disagree. What the core checks of
its own blocks is tested in ``tests/unit/blocks``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from control_plane.queries import check_pool
from control_plane.sessions.session import Session
from kvplane import ops
from tests.helpers.planning.planning_rig import PlanningRig


@pytest.fixture
def rig() -> PlanningRig:
    """Sequence 1 was written, sequence 2 is in flight, sequence 3 is on the host."""
    rig = PlanningRig(16)
    rig.admit(1, range(12))
    rig.admit(3, range(100, 104))
    rig.run()
    rig.admit(2, range(200, 220))
    rig.step(ops.swap([3], "host"))
    return rig


def test_a_pool_in_use_passes(rig: PlanningRig) -> None:
    check_pool(rig.pool, rig.sessions.values())


def _receipts(session: Session) -> None:
    session.receipted[0] += 1


def _ran(session: Session) -> None:
    session.plans[1] = session.plans.pop(3)


def _lost(session: Session) -> None:
    session.plans.clear()


def _made(session: Session) -> None:
    session.last_plan += 1


FAULTS: dict[str, tuple[Callable[[Session], None], str]] = {
    "receipts that are not counted": (_receipts, "receipts differ"),
    "a plan that ran and is in flight": (_ran, "a plan that ran is in flight"),
    "a plan that is lost": (_lost, "plans in flight differ"),
    "a plan that the core did not make": (_made, "last plans differ"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_finds(rig: PlanningRig, fault: str) -> None:
    plant, message = FAULTS[fault]
    plant(rig.session)
    with pytest.raises(AssertionError, match=message):
        check_pool(rig.pool, rig.sessions.values())


def test_two_sessions_of_one_handle_are_found(rig: PlanningRig) -> None:
    other = rig.open(2)
    other.handle = rig.session.handle
    with pytest.raises(AssertionError, match="one handle"):
        check_pool(rig.pool, rig.sessions.values())
