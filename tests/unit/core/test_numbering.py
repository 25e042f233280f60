"""Requests are numbered: each runs once, and a duplicate that arrives late changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.sessions.numbering import Numbering, content_of
from kvplane import ops
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    KvplaneError,
    PoolFullError,
    SequenceNotFoundError,
    SessionNotFoundError,
    StaleIncarnationError,
    StepConflictError,
    StepOutOfOrderError,
    TooManyPlansInFlightError,
)
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_model import Engine, World

NUM_KEPT = 2
# How far behind the next number a request comes; most are the next.
BEHIND = st.sampled_from([0, 0, 0, 0, -1, 1, 2, 3, 9])


def request_of(number: int, content: bytes) -> cpb.StepRequest:
    operation = cpb.Operation(admit=cpb.Admit(token_ids=content))
    return cpb.StepRequest(number=number, operations=[operation])


def model_answer(
    answers: dict[int, tuple[bytes, bool]], number: int, content: bytes
) -> type[KvplaneError] | int | None:
    """What a request is told by a model that forgets nothing: an error's type, the number whose
    answer it gets, or None when it runs.
    """
    last = len(answers)
    if number < 1:
        return InvalidRequestError
    if number == last + 1:
        return None
    if number > last or number <= last - NUM_KEPT:
        return StepOutOfOrderError
    known, failed = answers[number]
    if known != content:
        return StepConflictError
    return PoolFullError if failed else number


@given(st.lists(st.tuples(BEHIND, st.sampled_from([b"a", b"b"]), st.booleans())))
def test_each_number_is_answered_as_by_a_dict(requests: list[tuple[int, bytes, bool]]) -> None:
    numbering, answers = Numbering(NUM_KEPT), dict[int, tuple[bytes, bool]]()
    for behind, content, fails in requests:
        number = numbering.last + 1 - behind
        request = request_of(number, content)
        got: type[KvplaneError] | int | None
        try:
            known = numbering.repeated(request)
            got = None if known is None else known.result()
        except KvplaneError as error:
            got = type(error)
        assert got == model_answer(answers, number, content)
        if got is None:
            numbering.use()
            numbering.remember(request, number, PoolFullError("later") if fails else None)
            answers[number] = (content, fails)
            if len(answers) % 2:
                numbering.settle()
        assert numbering.last == len(answers)
        assert len(numbering._answers) <= NUM_KEPT, "answers are not kept for ever"


def test_a_remembered_error_is_raised_anew_each_time_with_all_that_it_says() -> None:
    numbering = Numbering(1)
    numbering.use()
    first = PoolFullError("is full", field="operations", retry_delay_s=0.5)
    numbering.remember(request_of(1, b"a"), None, first)
    answer = numbering.repeated(request_of(1, b"a"))
    assert answer is not None
    again = []
    for _ in range(2):
        with pytest.raises(PoolFullError) as raised:
            answer.result()
        again.append(raised.value)
        assert (raised.value.message, raised.value.field) == ("is full", "operations")
        assert raised.value.retry_delay_s == 0.5
    assert len({id(error) for error in (first, *again)}) == 3, "a traceback would be kept with it"


def test_content_is_the_method_and_all_but_the_receipts() -> None:
    session = tpb.SessionRef(incarnation=1, session_id=2)
    step = cpb.StepRequest(session=session, number=3)
    with_receipts = cpb.StepRequest(
        session=session, number=3, receipts=[tpb.SignedPayload(type="r")]
    )
    assert content_of(step) == content_of(with_receipts)
    assert len(with_receipts.receipts) == 1, "the request itself stays whole"
    others = [
        cpb.AbortPlansRequest(session=session, number=3),
        cpb.AbortPlansRequest(session=session, number=3, plan_number=1),
        cpb.AbortPlansRequest(session=session, number=3, whole_tables=True),
        cpb.StepRequest(session=session, number=4),
        cpb.StepRequest(session=session, number=3, operations=[cpb.Operation()]),
    ]
    assert len({content_of(request) for request in (step, *others)}) == 6


def test_a_large_request_is_digested_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.sessions.numbering._SLICE_BYTES", 8)
    tokens = ops.pack_tokens(range(6))
    others = [
        ops.admit(1, tokens),
        ops.admit(1, ops.pack_tokens([0, 1, 2, 3, 4, 9])),
        ops.admit(2, tokens),
        ops.admit(1, tokens, num_compute_tokens=0),
        *(ops.append([1, 2], tokens, 3, first_positions=0, num_tokens=n) for n in ([2, 4], [4, 2])),
    ]
    steps = [cpb.StepRequest(number=1, operations=[each]) for each in others]
    assert len({content_of(step) for step in steps}) == len(steps)
    for step in steps:
        assert len(list(Numbering(1).digest(step))) == 3, "one for each 8 bytes"
        world = World()
        engine = world.engine()
        step.session.CopyFrom(engine.ref)
        answer = world.core.step(step, engine.tenant)
        assert world.core.step(step, engine.tenant) == answer
        step.operations[0].admit.token_ids += b"\1\0\0\0"
        with pytest.raises(StepConflictError):
            world.core.step(step, engine.tenant)


def test_of_a_request_that_may_be_large_only_a_digest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = World().engine()
    numbers = engine.session.numbers
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


# Through the core


def test_a_number_is_next_repeated_of_other_content_or_out_of_order() -> None:
    engine = World(max_plans_in_flight=2).engine()
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
        request = cpb.StepRequest(session=engine.ref, number=number, operations=[ops.free([])])
        with pytest.raises(error) as refused:
            engine.world.core.step(request, engine.tenant)
        assert (refused.value.field, refused.value.next_number) == ("number", 5)
        assert number < 1 or "as 5" in refused.value.message


@pytest.mark.parametrize(
    "send",
    [lambda engine: engine.step(), lambda engine: engine.abort(1), lambda engine: engine.resync()],
    ids=["step", "abort", "whole tables"],
)
def test_all_requests_share_one_numbering_and_methods_are_content(
    send: Callable[[Engine], Any],
) -> None:
    engine = World().engine()
    engine.step(ops.admit(1, range(8)))
    send(engine)
    methods: dict[str, Any] = {"step": cpb.StepRequest, "abort_plans": cpb.AbortPlansRequest}
    del methods[engine.sent[-1].method]
    ((other, request),) = methods.items()
    with pytest.raises(StepConflictError):
        getattr(engine.world.core, other)(
            request(session=engine.ref, number=engine.number), engine.tenant
        )
    engine.repeat(engine.sent[-1])


def test_a_request_that_fails_uses_its_number_and_keeps_its_error() -> None:
    engine = World(max_plans_in_flight=1, watermark=0.0).engine()
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
    engine, closed = world.engine(), world.engine()
    closed.close()
    for ref in (closed.ref, tpb.SessionRef(incarnation=99), tpb.SessionRef()):
        with pytest.raises((StaleIncarnationError, SessionNotFoundError)) as refused:
            world.core.step(cpb.StepRequest(session=ref, number=1), engine.tenant)
        assert refused.value.next_number == 0


def test_a_step_that_is_refused_has_applied_what_came_before() -> None:
    engine = World(max_plans_in_flight=1, watermark=0.0).engine()
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
    engine = World().engine()
    engine.step(ops.admit(1, range(8)))
    engine.run_all()
    sent = engine.sent[-1]
    again = cpb.StepRequest()
    again.CopyFrom(sent.request)
    again.receipts.append(tpb.SignedPayload(type="forged"))
    assert engine.world.core.step(again, engine.tenant) == sent.answer
    assert engine.state(1).num_written_tokens == 0, "one that is forged spoils the others"
    del again.receipts[:]
    again.receipts.extend(engine.receipts)
    assert engine.world.core.step(again, engine.tenant) == sent.answer
    assert engine.state(1).num_written_tokens == 8


def test_a_late_abort_changes_nothing() -> None:
    """Its caller gave up on the answer and went on: the plan ran, and more were made."""
    engine = World().engine()
    engine.admit(1, [*[1] * 8, 2, 3, 4, 5])
    engine.step(engine.growth(1, [6, 7], 2))
    abort = cpb.AbortPlansRequest(session=engine.ref, number=4, plan_number=engine.number)
    engine.run_all()
    engine.step(engine.growth(1, [8, 9], 2), receipts=engine.receipts)
    assert engine.number == abort.number
    before = engine.everything()
    with pytest.raises(StepConflictError):
        engine.world.core.abort_plans(abort, engine.tenant)
    assert engine.everything() == before
