"""A step's plan says what the tables hold, and what it reads stays until it has run."""

from __future__ import annotations

from control_plane.steps.answers import SignedPlan, step_answer
from kvplane import ops
from kvplane.wire import protocol, signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.planning.planning_rig import (
    BLOCK_SIZE,
    DEVICE,
    EPOCH,
    HOST,
    PlanningRig,
    entries_of,
    spans_of,
    transfers_of,
)


def test_a_step_that_asks_for_nothing_makes_no_plan() -> None:
    rig = PlanningRig()
    assert rig.step() == ([], None)
    assert (rig.session.plans, rig.session.last_plan) == ({}, 0)


def test_the_plan_is_signed_and_says_whose_it_is_and_what_it_follows() -> None:
    rig = PlanningRig()
    rig.admit(1, range(BLOCK_SIZE))
    rig.step()
    signed = rig.answer(ops.admit(2, range(100, 109))).plan
    signing.verify(
        rig.pool.key,
        signing.PLAN,
        signed.type,
        signed.payload,
        signed.signature,
        field="plan",
    )
    plan = plan_pb2.Plan.FromString(signed.payload)
    assert (plan.version, plan.session, plan.pool_id) == (
        protocol.NEWEST_PAYLOAD_VERSION,
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
    assert entries_of(plan.changes) == [(block, 1, True) for block in rig.state(2).table]
    assert rig.session.plans[3].digest == signing.digest(signed.payload)
    rig.check()


def test_an_answer_is_encoded_as_its_message_would_be() -> None:
    rig = PlanningRig()
    result = rig.answer(ops.admit(2, range(9)), ops.free([3]))
    news = cpb.News(num_blocks_asked=7)
    results = cpb.StepResponse(results=result.results)
    for payload in (b"", b"7", bytes(127), bytes(128), bytes(1 << 21)):
        plan = SignedPlan(payload, b"s" * 32) if payload else None
        for told in (None, news):
            answer = step_answer(rig.session, 12345, (), results, plan, told)
            whole = cpb.StepResponse()
            whole.results.extend(result.results)
            if plan is not None:
                whole.plan.type = signing.PLAN
                whole.plan.payload, whole.plan.signature = plan
            whole.usage.extend(rig.pool.usage())
            whole.revision = rig.pool.revision()
            if told is not None:
                whole.news.CopyFrom(told)
            assert answer.step == whole.SerializeToString()
            on_stream = cpb.StreamStepsResponse(number=12345, step=whole)
            assert answer.encoded == on_stream.SerializeToString()
            assert list(answer.results) == list(result.results)
            assert answer.has_plan == bool(payload)


def test_the_source_of_a_transfer_is_held_until_its_plan_has_run() -> None:
    rig = PlanningRig()
    rig.admit(1, range(8))
    rig.run()
    rig.step(ops.swap([1], "host"))
    assert rig.usage()["held"] == 1
    rig.run()
    assert rig.usage()["held"] == 0
    assert rig.obtainable() == 8
    rig.check()


def test_a_copy_on_write_copies_only_what_stands_before_the_write() -> None:
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.step(ops.fork(1, 2))
    _, plan = rig.step(ops.append(2, (), 4, first_positions=12))
    assert plan is not None
    ((source, destination),) = transfers_of(plan.transfers)
    assert (source[1], destination[1]) == (rig.state(1).table[1], rig.state(2).table[1])
    assert rig.pool.counters().num_copies_on_write == 1
    rig.check()
    rig.step(ops.fork(1, 3))
    _, plan = rig.step(ops.append(3, range(12, 24), 12, first_positions=12))
    assert plan is not None
    assert len(transfers_of(plan.transfers)) == 1, "the blocks after it are all new"
    rig.check()


def test_a_block_that_a_transfer_of_the_step_fills_is_not_allocated_again_in_it() -> None:
    """Two transfers of one plan would write two generations of one block."""
    rig = PlanningRig(num_host_blocks=1)
    rig.admit(1, range(8))
    rig.admit(2, range(100, 108))
    rig.run()
    (out, freed, again), plan = rig.step(
        ops.swap([1], "host"), ops.free([1]), ops.swap([2], "host")
    )
    assert not out.failures
    assert not freed.failures
    assert again.failures[0].HasField("shortage")
    assert plan is not None
    assert len(transfers_of(plan.transfers)) == 1
    rig.check()
    assert not rig.step(ops.swap([2], "host"))[0][0].failures, "the next step's plan comes after it"
    rig.check()


def test_the_plan_after_an_abort_keeps_tables_and_has_what_it_allocates() -> None:
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.run()
    rig.abort()
    _, plan = rig.step(
        ops.append(1, range(12, 20), 8, first_positions=12), ops.fork(1, 2), ops.free([9])
    )
    assert plan is not None
    assert plan.resync
    *_, new = rig.state(1).table
    assert entries_of(plan.changes)[:1] == [(new, 1, True)]
    rig.check()


def test_whole_tables_leave_out_transfers_into_blocks_that_were_moved_on_from() -> None:
    """What was copied there first is read from where it came."""
    rig = PlanningRig()
    (origin,) = rig.admit(1, range(8)).table
    rig.run()
    rig.abort()
    _, plan = rig.step(ops.swap([1], "host"), ops.swap([1], "device"))
    assert plan is not None
    (copy,) = rig.state(1).table
    assert transfers_of(plan.transfers) == [((DEVICE, origin, 1), (DEVICE, copy, 1))]
    assert entries_of(plan.changes) == [(copy, 1, True)]
    assert HOST not in plan.changes.tiers
    rig.run()
    assert rig.obtainable(tier=HOST) == 4
    rig.check()
