"""check_integrity finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_model import World

from control_plane.planning.integrity import check_pool
from control_plane.planning.session import Session
from kvplane import ops


def _twice(session: Session) -> None:
    session.sequences[1].table[1] = session.sequences[1].table[0]


def _forgotten(session: Session) -> None:
    session.sequences[1].need += 1


def _other_tokens(session: Session) -> None:
    session.sequences[1].tokens[0] ^= 1


def _backwards(session: Session) -> None:
    session.sequences[1].num_written = 99


def _in_vain(session: Session) -> None:
    session.sequences[1].pending.append((98, 20))


def _falling(session: Session) -> None:
    session.sequences[2].pending += [(3, 9), (3, 8)]


def _receipts(session: Session) -> None:
    session.receipted[0] += 1


def _ran(session: Session) -> None:
    session.plans[session.done] = next(iter(session.plans.values()))


def _unpinned(session: Session) -> None:
    next(iter(session.plans.values())).pins.pop()


def _lost(session: Session) -> None:
    del session.sequences[2]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (_twice, "table entries, not"),
        (_forgotten, "guarantee differs"),
        (_other_tokens, "holds other tokens"),
        (_backwards, "positions are out of order"),
        (_in_vain, "waits for a lost plan"),
        (_falling, "pending ends are not ascending"),
        (_receipts, "receipts differ"),
        (_ran, "pin it"),
        (_unpinned, "pin it"),
        (_lost, "table entries, not"),
    ],
)
def test_it_finds(fault: Callable[[Session], None], text: str) -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(20))
    engine.admit(2, range(50, 58))
    engine.step(ops.fork(1, 3), ops.swap_out([2]))
    session, pool = world.core._sessions[engine.id], world.core._pools["pool"]
    check_pool(pool, [session])
    fault(session)
    with pytest.raises(AssertionError, match=text):
        check_pool(pool, [session])
