"""The check of a pool's books finds each thing that can be wrong with them."""

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


def _change_known_tokens(rig: PlanningRig) -> None:
    rig.session.sequences[1].tokens[0] ^= 1


def _publish_what_is_written(rig: PlanningRig) -> None:
    sequence = rig.session.sequences[2]
    rig.pool.device.publish(rig.session.root, -1, bytes(sequence.tokens[:32]), sequence.table[:1])
    sequence.pending[-1] = (sequence.pending[-1][0], 5)


def _end_plans_in_flight(rig: PlanningRig) -> None:
    rig.session.receipted, rig.session.done = [9], 9


def _count_a_written_token_too_many(rig: PlanningRig) -> None:
    rig.session.sequences[1].num_written += 1


FAULTS: dict[str, tuple[Callable[[PlanningRig], object], str]] = {
    "a table entry that is not counted": (
        lambda rig: rig.session.sequences[1].table.pop(),
        r"device block \d+: 0 table entries, not 1",
    ),
    "a pin that no plan has": (
        lambda rig: rig.session.plans[max(rig.session.plans)].pins.clear(),
        r"device block \d+: 0 transfers pin it, not 1",
    ),
    "a published block on the host": (_publish_on_the_host, "a host block is published"),
    "a guarantee that no sequence needs": (
        lambda rig: setattr(rig.session.sequences[2], "need", 9),
        "guarantee differs",
    ),
    "a plan that ran and is in flight": (
        _end_plans_in_flight,
        "has run",
    ),
    "a receipt that is not counted": (
        lambda rig: setattr(rig.session, "receipted", [0]),
        "receipts differ",
    ),
    "positions out of order": (_count_a_written_token_too_many, "positions are out of order"),
    "pending ends that fall": (
        lambda rig: rig.session.sequences[2].pending.append((3, 1)),
        "pending ends fall",
    ),
    "a plan that is waited for and not in flight": (
        lambda rig: rig.session.sequences[2].pending.append((99, 20)),
        "waits in vain",
    ),
    "a live sequence that was freed": (
        lambda rig: setattr(rig.session.sequences[1], "generations", []),
        "is live, and freed",
    ),
    "a published block that is written": (_publish_what_is_written, "writes published block"),
    "other tokens than were published": (_change_known_tokens, "holds other tokens"),
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
