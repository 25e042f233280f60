"""A draft: what the plan says is what the tables hold, and what it reads stays until it has run."""

from __future__ import annotations

from planning_rig import (
    BLOCK_SIZE,
    DEVICE,
    EPOCH,
    HOST,
    PlanningRig,
    entries_of,
    spans_of,
    transfers_of,
)

from control_plane.blocks.block_store import HELD, PINNED
from control_plane.planning.sequence import Sequence
from control_plane.planning.steps.abort import abort_plans
from control_plane.planning.steps.draft import Draft
from kvplane import ops, protocol, signing
from kvplane.v1 import types_pb2 as tpb


def started(rig: PlanningRig, sequence_id: int, num_blocks: int) -> tuple[Draft, Sequence]:
    """A draft in which a sequence begins."""
    draft = rig.draft()
    sequence = Sequence(sequence_id, draft.number, bytes(4 * BLOCK_SIZE * num_blocks), num_blocks)
    rig.session.add(sequence)
    sequence.table = draft.allocate(DEVICE, num_blocks)
    draft.set(sequence, 0, b"\1" * num_blocks)
    return draft, sequence


def test_a_step_that_asks_for_nothing_makes_no_plan() -> None:
    rig = PlanningRig()
    assert rig.draft().finish() is None
    assert (rig.session.plans, rig.session.last_plan) == ({}, 0)


def test_the_plan_is_signed_and_says_whose_it_is_and_what_it_follows() -> None:
    rig = PlanningRig()
    started(rig, 1, 1)[0].finish()
    rig.draft().finish()
    draft, sequence = started(rig, 2, 2)
    draft.span(sequence, 9)
    signed = draft.finish()
    assert signed is not None
    field = "plan"
    signing.verify(
        rig.pool.key, signing.PLAN, signed.type, signed.payload, signed.signature, field=field
    )
    plan = tpb.Plan.FromString(signed.payload)
    assert (plan.version, plan.session, plan.pool_id) == (
        protocol.PAYLOAD_VERSION,
        rig.session.ref,
        "pool",
    )
    assert (list(plan.shard_epochs), plan.number, plan.previous, plan.resync) == (
        [EPOCH],
        3,
        1,
        False,
    )
    assert spans_of(plan.spans) == [(2, 0, 9)]
    assert rig.session.plans[3].digest == signing.digest(signed.payload)
    rig.check()


def test_entries_are_set_as_the_table_is_when_they_are_set() -> None:
    rig = PlanningRig()
    draft, sequence = started(rig, 1, 3)
    message = draft.changes.message()
    assert message is not None
    assert entries_of(message) == [(block, 1, True) for block in sequence.table]
    assert sequence.table_sent


def test_no_tokens_are_no_span() -> None:
    rig = PlanningRig()
    draft, sequence = started(rig, 1, 1)
    draft.span(sequence, 0)
    assert not draft.spans
    assert not draft.computes(sequence)
    draft.span(sequence, 3)
    assert draft.computes(sequence)
    assert (sequence.num_scheduled, sequence.pending) == (3, [(1, 3)])
    assert draft.touched == [sequence]


def test_the_source_of_a_transfer_is_pinned_until_its_plan_has_run() -> None:
    rig = PlanningRig()
    sequence = rig.admit(1, range(8))
    rig.run()
    (block,) = sequence.table
    rig.step(ops.swap_out([1]))
    assert rig.pool.device.state[block] == PINNED
    rig.run()
    assert rig.pool.device.pins[block] == 0
    assert rig.pool.device.num_obtainable(0) == 8
    rig.check()


def test_a_copy_on_write_copies_only_what_stands_before_the_write() -> None:
    rig = PlanningRig()
    sequence = rig.admit(1, range(12))
    rig.run()
    rig.step(ops.fork(1, 2))
    draft, table = rig.draft(), list(sequence.table)
    draft.copy_on_write(sequence, 1, first_position=BLOCK_SIZE)
    assert not draft.transfers, "the whole block is written anew"
    assert sequence.table[0] == table[0]
    assert sequence.table[1] != table[1]
    child = rig.session.sequences[2]
    draft.copy_on_write(child, 0, first_position=4)
    ((source, destination),) = draft.transfers
    assert (source[1], destination[1]) == (table[0], child.table[0])
    assert rig.pool.counters.num_copies_on_write == 1
    draft.finish()
    rig.check()


def test_a_block_that_a_transfer_of_the_step_fills_is_not_allocated_again_in_it() -> None:
    """Two transfers of one plan would write two generations of one block."""
    rig = PlanningRig(num_host_blocks=1)
    rig.admit(1, range(8))
    rig.admit(2, range(100, 108))
    rig.run()
    (out, freed, again), plan = rig.step(ops.swap_out([1]), ops.free([1]), ops.swap_out([2]))
    assert not out.failures
    assert not freed.failures
    assert again.failures[0].HasField("shortage")
    assert plan is not None
    assert len(transfers_of(plan.transfers)) == 1
    rig.check()
    assert not rig.step(ops.swap_out([2]))[0][0].failures, "the next step's plan comes after it"
    rig.check()


def test_the_plan_after_an_abort_has_whole_tables_and_each_block_allocated_once() -> None:
    rig = PlanningRig()
    sequence = rig.admit(1, range(12))
    rig.run()
    rig.session.numbers.use()
    abort_plans(rig.session, next_plan=rig.session.numbers.last + 1)
    _, plan = rig.step(
        ops.append(1, range(12, 20), 8, first_position=12), ops.fork(1, 2), ops.free([9])
    )
    assert plan is not None
    assert plan.resync
    first, second, new = sequence.table
    assert entries_of(plan.changes)[:3] == [(first, 1, False), (second, 1, False), (new, 1, True)]
    rig.check()


def test_whole_tables_leave_out_transfers_into_blocks_that_were_moved_on_from() -> None:
    """What was copied there first is read from where it came."""
    rig = PlanningRig()
    sequence = rig.admit(1, range(8))
    rig.run()
    (origin,) = sequence.table
    rig.session.numbers.use()
    abort_plans(rig.session, next_plan=rig.session.numbers.last + 1)
    _, plan = rig.step(ops.swap_out([1]), ops.swap_in([1]))
    assert plan is not None
    (copy,) = sequence.table
    assert transfers_of(plan.transfers) == [((DEVICE, origin, 1), (DEVICE, copy, 1))]
    assert entries_of(plan.changes) == [(copy, 1, True)]
    assert rig.pool.device.state[copy] == HELD
    assert HOST not in plan.changes.tiers
    rig.run()
    assert rig.pool.host.num_obtainable(1) == 4
    rig.check()
