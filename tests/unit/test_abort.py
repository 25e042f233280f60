"""An abort cuts every sequence to what receipts say was written, and undoes transfers."""

from __future__ import annotations

import pytest
from planning_rig import DEVICE, HOST, PlanningRig, entries_of

from control_plane.blocks.block_store import RETIRED
from control_plane.planning.steps.abort import abort_from, abort_plans
from kvplane import ops


@pytest.fixture
def rig() -> PlanningRig:
    """Sequence 1 has 12 tokens written, by plan 1; plan 2, in flight, writes 6 more."""
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.run()
    rig.step(ops.append(1, range(12, 18), 6, first_position=12))
    return rig


def test_what_no_receipt_covers_is_cut_with_its_tokens_and_blocks(rig: PlanningRig) -> None:
    sequence = rig.session.sequences[1]
    kept, released = sequence.table[:2], sequence.table[2:]
    rig.session.numbers.use()
    abort_from(rig.session, 2)
    rig.check()
    assert sequence.table == kept
    assert (sequence.num_tokens, sequence.num_written, sequence.num_scheduled) == (12, 12, 12)
    assert rig.session.plans == {}
    assert [rig.pool.device.state[block] for block in released] == [RETIRED]


def test_blocks_stay_retired_until_the_plan_of_whole_tables_has_run(rig: PlanningRig) -> None:
    (released,) = rig.session.sequences[1].table[2:]
    rig.session.numbers.use()
    abort_from(rig.session, 2)
    _, plan = rig.step()
    assert plan is not None
    assert plan.resync
    assert [entry[2] for entry in entries_of(plan.changes)] == [False, False]
    assert rig.pool.device.state[released] == RETIRED
    rig.run()
    assert rig.pool.device.num_obtainable(0) == 6
    rig.check()


def test_earlier_plans_in_flight_are_aborted_too(rig: PlanningRig) -> None:
    rig.step(ops.append(1, range(18, 20), 2, first_position=18))
    rig.session.numbers.use()
    abort_from(rig.session, 3)
    assert rig.session.plans == {}
    assert rig.session.is_voided(2)


def test_a_number_without_a_plan_in_flight_or_after_it_changes_nothing(rig: PlanningRig) -> None:
    rig.session.numbers.use()
    rig.session.numbers.use()
    abort_from(rig.session, 3)
    assert list(rig.session.plans) == [2]
    assert not rig.session.resync_due


def test_a_sequence_that_was_moved_goes_back_to_the_blocks_it_came_from() -> None:
    rig = PlanningRig()
    sequence = rig.admit(1, range(12))
    rig.run()
    before = list(sequence.table)
    rig.step(ops.swap_out([1]))
    rig.step(ops.swap_in([1]))
    assert sequence.table != before
    abort_plans(rig.session, next_plan=4)
    rig.check()
    assert (sequence.tier, sequence.table, sequence.moved_by) == (DEVICE, before, 0)


def test_a_swap_that_has_run_is_not_undone() -> None:
    rig = PlanningRig()
    sequence = rig.admit(1, range(12))
    rig.step(ops.swap_out([1]))
    rig.run()
    copies = list(sequence.table)
    rig.step(ops.swap_in([1]))
    abort_plans(rig.session, next_plan=4)
    rig.check()
    assert (sequence.tier, sequence.table) == (HOST, copies)


def test_a_fork_stays_with_what_its_parent_had_written() -> None:
    rig = PlanningRig()
    parent = rig.admit(1, range(12))
    rig.run()
    rig.step(ops.append(1, [12], 1, first_position=12))
    rig.step(ops.fork(1, 2), ops.append(2, [13], 1, first_position=13))
    abort_plans(rig.session, next_plan=4)
    rig.check()
    child = rig.session.sequences[2]
    assert child.table == parent.table
    assert child.tokens == parent.tokens
    assert (child.num_tokens, child.num_written) == (12, 12)


def test_a_sequence_of_which_nothing_was_written_has_an_empty_table() -> None:
    rig = PlanningRig()
    sequence = rig.admit(1, range(12))
    abort_plans(rig.session, next_plan=2)
    rig.check()
    assert (sequence.tier, sequence.table, sequence.num_tokens) == (DEVICE, [], 0)
    _, plan = rig.step()
    assert plan is not None
    assert plan.resync
    assert not plan.HasField("changes")
