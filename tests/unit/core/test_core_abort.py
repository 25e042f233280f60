"""Aborting plans: what is undone, what stays, and how the data plane learns of it."""

from __future__ import annotations

import pytest

from control_plane.steps.abort import abort_plans
from kvplane import ops
from kvplane.errors import InvalidRequestError, PlanReceiptedError
from kvplane.slices import run_to_end
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import DEVICE
from tests.helpers.core.core_model import World


def test_an_abort_undoes_swaps_and_copies_and_keeps_cached_hits() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(20))
    engine.admit(2, range(100, 112))
    before = {i: engine.table(i) for i in (1, 2)}
    engine.step(
        ops.fork(2, 3), ops.swap([1], "host"), engine.growth(2, [7], 1), ops.admit(4, range(17))
    )
    engine.abort(engine.number)
    assert {i: engine.table(i) for i in (1, 2)} == before
    assert engine.table(3) == before[2]
    assert engine.state(4).num_tokens == 16
    assert engine.state(1).tier == DEVICE
    world.core.check_integrity()
    engine.send(engine.growth(4, [16], 1))
    engine.settle()
    engine.check()


def test_the_first_operation_after_an_abort_brings_a_plan_of_all_tables() -> None:
    engine = World().engine()
    engine.admit(1, range(12))
    engine.step(engine.growth(1, [12], 1))
    engine.abort(engine.number)
    engine.queue.clear()
    engine.submit()
    engine.step()
    assert not engine.queue, "a step without operations makes no plan"
    engine.step(ops.free([]))
    assert engine.queue[0].plan.resync
    assert engine.queue[0].plan.changes.kinds == bytes([plan_pb2.TABLE_CHANGE_KIND_KEEP])
    engine.run_all()
    engine.settle()
    engine.check()


def test_receipts_that_an_abort_brings_count_before_it() -> None:
    engine = World().engine()
    engine.step(ops.admit(1, range(12)))
    engine.step(engine.growth(1, [12], 1))
    engine.run_all()
    first, _ = engine.receipts
    engine.abort(2, [first])
    assert engine.state(1).num_tokens == 12
    engine.queue.clear()
    engine.step(engine.growth(1, [13], 1))
    engine.run_all()
    engine.resync(engine.receipts)
    assert engine.state(1).num_tokens == 13


def test_a_freed_sequence_whose_plans_are_aborted_publishes_nothing() -> None:
    world = World()
    engine = world.engine()
    engine.step(ops.admit(1, range(17)))
    engine.step(ops.free([1]))
    engine.abort(1)
    engine.queue.clear()
    engine.step(ops.free([]))
    engine.run_all()
    engine.settle()
    assert engine.lookup(range(17)) == 0
    assert world.usage()["retired"] == 0
    world.core.check_integrity()


def test_only_a_plan_that_was_made_and_has_not_run_can_be_aborted() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(8))
    engine.step(engine.growth(1, [8], 1))
    made = engine.number
    session = world.core.sessions.by_id[engine.id]
    for number in (-1, 99):
        with pytest.raises(InvalidRequestError, match="plan_number: is not the number of a plan"):
            engine.abort(number)
    with pytest.raises(PlanReceiptedError, match="plan 1 has run"):
        engine.abort(1)
    assert list(session.plans) == [made]
    engine.abort(made)
    assert not session.plans
    run_to_end(
        abort_plans(session, cpb.AbortPlansRequest(plan_number=made))
    )  # aborted before: nothing to do
    engine.queue.clear()
    engine.send(engine.growth(1, [8], 1))
    engine.settle()
    engine.abort(made)
    assert engine.state(1).num_tokens == 9, "what was aborted has not run, though later plans have"
