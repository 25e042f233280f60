"""Requests are numbered: each runs once, and a duplicate that arrives late changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from control_plane.config import CoreConfig
from kvplane import ops
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    KvplaneError,
    PositionMismatchError,
    ProtocolMismatchError,
    SequenceNotFoundError,
    SessionNotFoundError,
    StaleEpochError,
    StaleIncarnationError,
    StepConflictError,
    StepOutOfOrderError,
    TooManyPlansInFlightError,
)
from kvplane.wire import signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_messages import pack
from tests.helpers.core.core_model import Engine, World, error_in


def test_a_number_is_next_repeated_of_other_content_or_out_of_order() -> None:
    world = World(config=CoreConfig(max_plans_in_flight=2))
    engine = world.engine()
    for _ in range(4):
        engine.submit()
    for sent in engine.sent:
        engine.repeat(sent)
    for number, error in (
        (-1, InvalidRequestError),
        (0, InvalidRequestError),
        (1, StepOutOfOrderError),
        (2, StepConflictError),
        (4, StepConflictError),
        (6, StepOutOfOrderError),
    ):
        other = [ops.free([])]
        request = cpb.StepRequest(session=engine.ref, number=number, operations=other)
        with pytest.raises(error) as refused:
            world.core.step(request, engine.tenant)
        assert (refused.value.field, refused.value.next_number) == ("number", 5)
    engine.step()
    with pytest.raises(StepOutOfOrderError, match="send the next request as 6"):
        world.core.step(cpb.StepRequest(session=engine.ref, number=7), engine.tenant)


def test_of_a_request_that_may_be_large_only_a_digest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    engine = world.engine()
    numbers = world.core.sessions.by_id[engine.id].numbers
    engine.step(ops.admit(1, range(8)))
    assert numbers._latest is not None, "the service settles it once the answer is sent"
    engine.abort(1)
    assert numbers._latest is None
    with pytest.raises(InvalidRequestError):
        engine.abort(77)
    assert numbers._latest is None
    monkeypatch.setattr("control_plane.steps.requests.SLICE_TOKENS", 4)
    engine.step(ops.admit(2, range(8)), ops.admit(3, range(8)))
    assert numbers._latest is None, "a request of several slices"


REQUESTS: dict[str, Callable[[Engine], Any]] = {
    "step": lambda engine: engine.step(),
    "abort_plans": lambda engine: engine.abort(1),
}


@pytest.mark.parametrize("method", REQUESTS)
def test_all_requests_share_one_numbering_and_methods_are_content(method: str) -> None:
    world = World()
    engine = world.engine()
    engine.step(ops.admit(1, range(8)))
    REQUESTS[method](engine)
    for other in set(REQUESTS) - {method}:
        sent = engine.sent[-1].request
        names = {"step": cpb.StepRequest, "abort_plans": cpb.AbortPlansRequest}
        request = names[other](session=sent.session, number=sent.number)
        with pytest.raises(StepConflictError):
            getattr(world.core, other)(request, engine.tenant)
    engine.repeat(engine.sent[-1])


def test_a_request_that_fails_uses_its_number_and_keeps_its_error() -> None:
    world = World(config=CoreConfig(max_plans_in_flight=1, watermark=0.0))
    engine = world.engine()
    engine.step(ops.admit(1, range(8)))
    failing: tuple[tuple[Callable[[], Any], type[KvplaneError]], ...] = (
        (lambda: engine.step(ops.admit(2, range(8))), TooManyPlansInFlightError),
        (lambda: engine.submit([tpb.SignedPayload(type="other")]), BadSignatureError),
        (
            lambda: engine.submit(deferred=ops.deferred_tokens([9], [1], [0], [1], [1])),
            SequenceNotFoundError,
        ),
        (lambda: engine.abort(99), InvalidRequestError),
    )
    for fail, error in failing:
        number = engine.number
        with pytest.raises(error) as refused:
            fail()
        assert refused.value.next_number == number + 2
        engine.repeat(engine.sent[-1])
        assert engine.number == number + 1
    engine.submit()
    engine.repeat(engine.sent[-1])


def test_an_error_before_the_session_is_found_gives_no_number() -> None:
    world = World()
    engine = world.engine()
    closed = world.engine()
    world.core.close_session(closed.ref, closed.tenant)
    for ref in (closed.ref, tpb.SessionRef(incarnation=99), tpb.SessionRef()):
        with pytest.raises((StaleIncarnationError, SessionNotFoundError)) as refused:
            world.core.step(cpb.StepRequest(session=ref, number=1), engine.tenant)
        assert refused.value.next_number == 0


def test_a_step_that_is_refused_has_applied_what_came_before() -> None:
    world = World(config=CoreConfig(max_plans_in_flight=1, watermark=0.0))
    engine = world.engine()
    engine.admit(1, range(7))
    engine.step(engine.growth(1, num_slots=1))
    with pytest.raises(TooManyPlansInFlightError):
        engine.step(ops.free([1]), deferred=True)
    assert engine.state(1).num_tokens == 8, "deferred tokens come before the limit"
    engine.run_all()
    deferred = cpb.StepRequest(
        receipts=engine.receipts, deferred_tokens=ops.deferred_tokens([9], [1], [0], [1], [1])
    )
    with pytest.raises(SequenceNotFoundError):
        engine.call("step", deferred)
    assert engine.state(1).num_written_tokens == 8, "receipts come before deferred tokens"


def test_receipts_of_a_repeat_are_applied_and_do_not_change_its_answer() -> None:
    world = World()
    engine = world.engine()
    engine.step(ops.admit(1, range(8)))
    engine.run_all()
    sent = engine.sent[-1]
    again = cpb.StepRequest()
    again.CopyFrom(sent.request)
    again.receipts.append(tpb.SignedPayload(type="forged"))
    assert world.core.step(again, engine.tenant) == sent.answer
    assert engine.state(1).num_written_tokens == 0, "one that is forged spoils the others"
    del again.receipts[:]
    again.receipts.extend(engine.receipts)
    assert world.core.step(again, engine.tenant) == sent.answer
    assert engine.state(1).num_written_tokens == 8


def test_answers_are_not_kept_for_ever() -> None:
    world = World(config=CoreConfig(max_plans_in_flight=4))
    engine = world.engine()
    for _ in range(20):
        engine.submit()
    assert len(world.core.sessions.by_id[engine.id].numbers._answers) == 5


# A duplicate of each kind that arrives late


def test_a_late_abort_changes_nothing() -> None:
    """Its caller gave up on the answer and went on: the plan ran, and more were made."""
    world = World()
    engine = world.engine()
    engine.admit(1, [*[1] * 8, 2, 3, 4, 5])
    engine.step(engine.growth(1, [6, 7], 2))
    abort = cpb.AbortPlansRequest(session=engine.ref, number=4, plan_number=engine.number)
    engine.run_all()
    engine.step(engine.growth(1, [8, 9], 2), receipts=engine.receipts)
    assert engine.number == abort.number
    before = engine.everything()
    with pytest.raises(StepConflictError):
        world.core.abort_plans(abort, engine.tenant)
    assert engine.everything() == before
    engine.receipts.clear()
    engine.run_all()
    engine.settle()
    assert engine.lookup([*[1] * 8, 2, 3, 4, 5, 6, 7, 8, 9, 0]) == 16
    assert engine.lookup([*[1] * 8, 2, 3, 4, 5, 8, 9, 10, 11, 0]) == 8


def test_an_append_after_an_abort_that_its_caller_does_not_know_of_lands_nowhere() -> None:
    engine = World().engine()
    engine.admit(1, range(12))
    engine.step(engine.growth(1, [12, 13], 2))
    engine.abort(engine.number)
    (result,) = engine.step(ops.append(1, pack([14, 15]), 2, first_positions=14)).results
    error = error_in(result)
    assert type(error) is PositionMismatchError
    assert "position 12, not 14" in error.message


def test_deferred_tokens_of_a_sequence_that_was_freed_are_not_the_next_ones() -> None:
    engine = World().engine()
    engine.admit(7, [5] * 7)
    engine.append(7, num_slots=1)
    old = ops.deferred_tokens([7], [1], [7], [1], pack([77]))
    engine.send(ops.free([7]))
    admitted_by = engine.number + 1
    engine.send(ops.admit(7, [5] * 7))
    engine.send(engine.growth(7, num_slots=1))
    with pytest.raises(SequenceNotFoundError, match=r"deferred_tokens\.admitted_by\[0\]"):
        engine.submit(deferred=old)
    assert engine.state(7).admitted_by == admitted_by
    engine.submit(deferred=ops.deferred_tokens([7], [admitted_by], [7], [1], pack([78])))
    assert engine.state(7).num_tokens == 8


# Receipts


def forged(receipt: plan_pb2.Receipt, **fields: Any) -> plan_pb2.Receipt:
    changed = plan_pb2.Receipt()
    changed.CopyFrom(receipt)
    changed.MergeFrom(plan_pb2.Receipt(**fields))
    return changed


UNKNOWN_FIELD = b"\xc2\x3e\x01x"  # field 1000, one byte


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"version": 2}, ProtocolMismatchError, "version"),
        ({"session": tpb.SessionRef(incarnation=9)}, StaleIncarnationError, "session.incarnation"),
        ({"session": tpb.SessionRef(session_id=9)}, BadSignatureError, "session.session_id"),
        ({"pool_id": "other"}, BadSignatureError, "pool_id"),
        ({"shard_index": 1}, BadSignatureError, "shard_index"),
        ({"epoch": 1}, StaleEpochError, "epoch"),
        ({"plan_number": 2}, BadSignatureError, "plan_number"),
        ({"plan_number": -1}, BadSignatureError, "plan_number"),
        ({"plan_digest": b"other"}, BadSignatureError, "plan_digest"),
    ],
)
def test_a_receipt_of_something_else_is_refused_and_none_is_applied(
    fields: dict[str, Any], error: type[KvplaneError], field: str
) -> None:
    world = World()
    engine = world.engine()
    engine.step(ops.admit(1, range(8)))
    engine.run_all()
    (good,) = engine.receipts
    receipt = forged(plan_pb2.Receipt.FromString(good.payload), **fields)
    with pytest.raises(error) as refused:
        engine.submit([good, world.shards[0].sign_receipt(receipt)])
    assert refused.value.field == f"receipts[1].{field}"
    assert engine.state(1).num_written_tokens == 0
    engine.submit([good])
    assert engine.state(1).num_written_tokens == 8
    engine.submit([good])  # known already


def test_a_receipt_that_is_not_signed_or_can_not_be_read_is_refused() -> None:
    world = World()
    engine = world.engine()
    engine.step(ops.admit(1, range(8)))
    engine.run_all()
    (good,) = engine.receipts
    key = world.shards[0].key

    def signed(payload: bytes, type_tag: str = signing.RECEIPT) -> tpb.SignedPayload:
        signature = signing.sign(key, type_tag, payload)
        return tpb.SignedPayload(type=type_tag, payload=payload, signature=signature)

    wrong: tuple[tuple[tpb.SignedPayload, type[KvplaneError], str], ...] = (
        (signed(good.payload, signing.PLAN), BadSignatureError, "type"),
        (
            tpb.SignedPayload(type=good.type, payload=good.payload, signature=bytes(32)),
            BadSignatureError,
            "signature",
        ),
        (signed(b"\xff"), InvalidRequestError, "payload"),
        (signed(good.payload + UNKNOWN_FIELD), InvalidRequestError, "payload"),
    )
    for payload, error, field in wrong:
        with pytest.raises(error) as refused:
            engine.submit([payload])
        assert refused.value.field == f"receipts[0].{field}"
    assert engine.state(1).num_written_tokens == 0
