"""The check of a pool's books finds what is seldom wrong with them; test_core_integrity.py has what
a wrong operation would bring about.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from planning_rig import DEVICE, PlanningRig

from control_plane.planning.integrity import check_pool
from kvplane import ops


@pytest.fixture
def rig() -> PlanningRig:
    """Sequence 1 was written, sequence 2 is in flight, sequence 3 is on the host."""
    rig = PlanningRig(16)
    rig.admit(1, range(12))
    rig.admit(3, range(100, 104))
    rig.run()
    rig.admit(2, range(200, 220))
    rig.step(ops.swap_out([3]))
    return rig


def test_a_pool_in_use_passes(rig: PlanningRig) -> None:
    check_pool(rig.pool, rig.sessions.values())


def _publish_on_the_host(rig: PlanningRig) -> None:
    rig.pool.host.index.publish(b"root", -1, bytes(32), rig.session.sequences[3].table)


def _publish_what_is_written(rig: PlanningRig) -> None:
    sequence = rig.session.sequences[2]
    rig.pool.device.publish(rig.session.root, -1, bytes(sequence.tokens[:32]), sequence.table[:1])
    sequence.pending[-1] = (sequence.pending[-1][0], 5)


def _end_plans_in_flight(rig: PlanningRig) -> None:
    rig.session.receipted, rig.session.done = [9], 9


FAULTS: dict[str, tuple[Callable[[PlanningRig], object], str]] = {
    "a published block on the host": (_publish_on_the_host, "a host block is published"),
    "a plan that ran and is in flight": (
        _end_plans_in_flight,
        "has run",
    ),
    "a live sequence that was freed": (
        lambda rig: setattr(rig.session.sequences[1], "generations", []),
        "is live, but marked as freed",
    ),
    "a published block that is written": (_publish_what_is_written, "writes published block"),
    "blocks that are nowhere": (
        lambda rig: rig.pool.device.num_in.__setitem__(0, 3),
        "state counts differ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_finds(rig: PlanningRig, fault: str) -> None:
    plant, message = FAULTS[fault]
    plant(rig)
    with pytest.raises(AssertionError, match=message):
        check_pool(rig.pool, rig.sessions.values())


def test_a_block_twice_in_a_table_is_found_though_it_is_counted_twice(rig: PlanningRig) -> None:
    sequence = rig.session.sequences[2]
    rig.session.share(DEVICE, sequence.table[:1])
    sequence.table.append(sequence.table[0])
    with pytest.raises(AssertionError, match="a block twice in its table"):
        check_pool(rig.pool, rig.sessions.values())


def test_a_session_that_is_left_out_is_missed(rig: PlanningRig) -> None:
    with pytest.raises(AssertionError):
        check_pool(rig.pool, [])
