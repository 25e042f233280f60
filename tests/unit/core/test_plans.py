"""The plan of a step is signed and says what changes; an abort undoes what has not run."""

from __future__ import annotations

import pytest

from control_plane.steps.answers import SignedPlan, step_answer
from control_plane.steps.requests import abort_plans
from kvplane import ops
from kvplane.errors import InvalidRequestError, PlanReceiptedError
from kvplane.slices import run_to_end
from kvplane.wire import protocol, signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import BLOCK, POOL, allocated_of, spans_of
from tests.helpers.core.core_model import World


def test_the_plan_is_signed_and_says_whose_it_is_and_what_it_follows() -> None:
    engine = World().engine()
    session = engine.session
    begin = plan_pb2.Plan.FromString(session.plan_prefix)
    assert begin.SerializeToString() == session.plan_prefix
    engine.step(ops.admit(1, range(BLOCK)))
    engine.step()
    engine.step(ops.admit(2, range(100, 109)))
    signed, plan = engine.queue[1].signed, engine.queue[1].plan
    payload = signed.payload
    key = engine.world.shards[0].pool_key
    signing.verify(key, signing.PLAN, signed.type, payload, signed.signature, field="plan")
    for known in (begin, plan):
        assert (known.version, known.pool_id) == (protocol.NEWEST_PAYLOAD_VERSION, POOL)
        assert (known.session, known.shard_epochs) == (engine.ref, [engine.world.shards[0].epoch])
    assert (plan.number, plan.previous, plan.resync) == (3, 1, False)
    assert spans_of(plan) == [(2, 0, 9)]
    assert allocated_of(plan) == engine.blocks(2)
    assert session.plans[3].digest == signing.digest(payload)


def test_an_answer_is_encoded_as_its_message_would_be() -> None:
    engine = World().engine()
    session = engine.session
    result = engine.step(ops.admit(2, range(9)), ops.free([3]))
    news = cpb.News(num_blocks_asked=7)
    results = cpb.StepResponse(results=result.results)
    for payload in (b"", b"7", bytes(127), bytes(128), bytes(1 << 21)):
        plan = SignedPlan(payload, b"s" * 32) if payload else None
        for told in (None, news):
            answer = step_answer(session, 12345, (), results, plan, told)
            whole = cpb.StepResponse()
            whole.results.extend(result.results)
            if plan is not None:
                whole.plan.type = signing.PLAN
                whole.plan.payload, whole.plan.signature = plan
            whole.usage.extend(session.pool.usage())
            whole.revision = session.pool.revision()
            if told is not None:
                whole.news.CopyFrom(told)
            assert answer.step == whole.SerializeToString()
            on_stream = cpb.StreamStepsResponse(number=12345, step=whole)
            assert answer.encoded == on_stream.SerializeToString()
            assert list(answer.results) == list(result.results)
            assert answer.has_plan == bool(payload)


# Aborts


def test_a_number_without_a_plan_is_not_called_a_plan_that_ran() -> None:
    engine = World().engine()
    engine.admit(1, range(8))  # number 2 submits its receipt
    engine.send(engine.growth(1, [8], 1))
    engine.settle()
    with pytest.raises(PlanReceiptedError, match="2 is not after plan 3, the last that ran"):
        engine.abort(2)


def test_the_first_operation_after_an_abort_brings_a_plan_of_all_tables() -> None:
    engine = World().engine()
    engine.admit(1, range(12))
    for first in (12, 13):
        engine.step(engine.growth(1, [first], 1))
    session = engine.session
    engine.abort(engine.number)
    assert session.plans == {}, "earlier ones in flight are aborted too"
    assert session.is_voided(engine.number - 2)
    engine.queue.clear()
    engine.submit()
    engine.step()
    assert not engine.queue, "a step without operations makes no plan"
    engine.step(ops.free([]))
    assert engine.queue[0].plan.resync
    assert engine.queue[0].plan.changes.kinds == bytes([plan_pb2.TABLE_CHANGE_KIND_KEEP])
    engine.run_all()
    engine.settle()
    engine.world.core.check_integrity()


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


def test_only_a_plan_that_was_made_and_has_not_run_can_be_aborted() -> None:
    engine = World().engine()
    engine.admit(1, range(8))
    engine.step(engine.growth(1, [8], 1))
    made = engine.number
    session = engine.session
    engine.submit()
    for number in (-1, made + 1, 99):
        with pytest.raises(InvalidRequestError, match="plan_number: is not the number of a plan"):
            engine.abort(number)
    with pytest.raises(PlanReceiptedError, match="1 is not after plan 1, the last that ran"):
        engine.abort(1)
    assert (list(session.plans), session.resync_due) == ([made], False)
    engine.abort(made)
    assert not session.plans
    run_to_end(
        abort_plans(session, cpb.AbortPlansRequest(plan_number=made))
    )  # aborted before: nothing to do
    engine.queue.clear()
    engine.do(engine.growth(1, [8], 1))
    engine.abort(made)
    assert engine.state(1).num_tokens == 9, "what was aborted has not run, though later plans have"


def test_plans_that_were_aborted_are_remembered_a_thousand_of_them() -> None:
    engine = World().engine()
    session = engine.session
    for number in range(1, 2000):
        session.void(number)
    assert session.is_voided(1999)
    assert session.is_voided(1999 - 1023)
    assert not session.is_voided(1999 - 1024)
