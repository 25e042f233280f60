"""An abort cuts every sequence to what receipts say was written, and undoes transfers."""

from __future__ import annotations

import pytest

from control_plane.steps.abort import abort_plans
from kvplane import ops
from kvplane.errors import InvalidRequestError
from kvplane.slices import run_to_end
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.planning.planning_rig import DEVICE, HOST, PlanningRig


@pytest.fixture
def rig() -> PlanningRig:
    """Sequence 1 has 12 tokens written, by plan 1; plan 2, in flight, writes 6 more."""
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.run()
    rig.step(ops.append(1, range(12, 18), 6, first_positions=12))
    return rig


def abort_from_next(rig: PlanningRig, plan_number: int) -> None:
    rig.session.numbers.use()
    number = rig.session.numbers.last
    request = cpb.AbortPlansRequest(number=number, plan_number=plan_number)
    run_to_end(abort_plans(rig.session, request))


def test_what_no_receipt_covers_is_cut_with_its_tokens_and_blocks(rig: PlanningRig) -> None:
    kept = rig.state(1).table[:2]
    abort_from_next(rig, 2)
    rig.check()
    state = rig.state(1)
    assert state.table == kept
    assert (state.num_tokens, state.num_written, state.num_scheduled) == (12, 12, 12)
    assert rig.session.plans == {}
    assert rig.usage() == {"free": 5, "cached": 0, "held": 2, "retired": 1}


def test_blocks_stay_retired_until_the_plan_after_it_has_run(rig: PlanningRig) -> None:
    abort_from_next(rig, 2)
    _, plan = rig.step()
    assert plan is not None
    assert plan.resync
    assert plan.changes.kinds == bytes([plan_pb2.TABLE_CHANGE_KIND_KEEP])
    assert rig.usage()["retired"] == 1
    other = rig.open(2)
    assert rig.obtainable(other) == 5
    rig.run()
    assert rig.obtainable(other) == 6
    rig.check()


def test_earlier_plans_in_flight_are_aborted_too(rig: PlanningRig) -> None:
    rig.step(ops.append(1, range(18, 20), 2, first_positions=18))
    abort_from_next(rig, 3)
    assert rig.session.plans == {}
    assert rig.session.is_voided(2)


def test_a_number_that_made_no_plan_is_refused(rig: PlanningRig) -> None:
    rig.run()
    _, plan = rig.step()
    assert plan is None
    rig.step(ops.append(1, [18], 1, first_positions=18))
    for number in (3, 5):
        with pytest.raises(InvalidRequestError, match="is not the number of a plan"):
            abort_from_next(rig, number)
    assert list(rig.session.plans) == [4]
    assert not rig.session.resync_due


def test_a_sequence_that_was_moved_goes_back_to_the_blocks_it_came_from() -> None:
    rig = PlanningRig()
    before = rig.admit(1, range(12)).table
    rig.run()
    rig.step(ops.swap([1], "host"))
    rig.step(ops.swap([1], "device"))
    assert rig.state(1).table != before
    rig.abort()
    rig.check()
    assert (rig.state(1).tier, rig.state(1).table) == (DEVICE, before)


def test_a_swap_that_has_run_is_not_undone() -> None:
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.step(ops.swap([1], "host"))
    rig.run()
    copies = rig.state(1).table
    rig.step(ops.swap([1], "device"))
    rig.abort()
    rig.check()
    assert (rig.state(1).tier, rig.state(1).table) == (HOST, copies)


def test_a_fork_stays_with_what_its_parent_had_written() -> None:
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.run()
    rig.step(ops.append(1, [12], 1, first_positions=12))
    rig.step(ops.fork(1, 2), ops.append(2, [13], 1, first_positions=13))
    rig.abort()
    rig.check()
    parent, child = rig.state(1), rig.state(2)
    assert child.table == parent.table
    assert (child.num_tokens, child.num_written) == (12, 12)


def test_a_sequence_of_which_nothing_was_written_has_an_empty_table() -> None:
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.abort()
    rig.check()
    state = rig.state(1)
    assert (state.tier, state.table, state.num_tokens) == (DEVICE, [], 0)
    _, plan = rig.step()
    assert plan is not None
    assert plan.resync
    assert not plan.HasField("changes")
