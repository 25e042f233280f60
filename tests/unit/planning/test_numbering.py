"""The numbers of a session's requests: a dict of what came of each, of which the last are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.sessions.numbering import Numbering, content_of
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    PoolFullError,
    StepConflictError,
    StepOutOfOrderError,
)
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

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


@pytest.mark.parametrize("number", [-1, 0, 1, 2, 4])
def test_a_refusal_names_the_number_and_says_which_is_next(number: int) -> None:
    numbering = Numbering(1)
    for i, content in enumerate((b"1", b"2"), 1):
        numbering.use()
        numbering.remember(request_of(i, content), None)
    with pytest.raises(KvplaneError) as refused:
        numbering.repeated(request_of(number, b"other"))
    assert refused.value.field == "number"
    assert number < 1 or "as 3" in refused.value.message


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
