"""A session's steps over bad networks: each runs once, and no call waits for ever."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvplane import ops
from kvplane.errors import (
    BadSignatureError,
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    KvplaneError,
    PoolFullError,
    StaleIncarnationError,
    TooManyPlansInFlightError,
)
from kvplane.results import AbortResult
from kvplane.wire import columns
from kvplane.wire.error_codec import to_wire
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.refusals import refused
from tests.helpers.sdk_peers import (
    LAYOUT,
    SESSION,
    ScriptedControlPlane,
    answer_step,
    hang_up,
    in_turn,
    never,
    payload,
    plan_of,
)
from tests.helpers.waiting import until


def refuse(error: KvplaneError, next_number: int = 0) -> Any:
    """Refuse a step."""
    error.next_number = next_number
    return lambda request: pb.StreamStepsResponse(number=request.number, error=to_wire(error))


async def test_all_calls_that_change_a_session_share_one_numbering(plane, session) -> None:
    await session.step([ops.free([9])])
    assert (await session.run(ops.admit(1, [1, 2]))).plan == plan_of(2)
    await session.submit_receipts()
    await session.abort_plans(2)
    assert (await session.abort_plans(whole_tables=True)).plan == plan_of(5)
    await session.step([ops.free([])])
    assert plane.numbers == [1, 2, 3, 4, 5, 6]
    assert (session.id, session.incarnation) == (SESSION.session_id, SESSION.incarnation)
    assert all(request.session == SESSION for request in plane.requests)


async def test_concurrent_steps_run_one_after_the_other(plane, session) -> None:
    results = await asyncio.gather(*(session.step([ops.free([i])]) for i in range(1, 6)))
    assert [result.plan for result in results] == [plan_of(i) for i in range(1, 6)]


async def test_a_step_whose_stream_breaks_is_sent_again_as_it_was(plane, session) -> None:
    plane.script = in_turn(hang_up)
    session.add_receipt(payload(b"r1"))
    assert (await session.step([ops.admit(1, [4, 5])])).plan == plan_of(1)
    assert plane.requests[0] == plane.requests[1]
    assert (plane.numbers, plane.streams) == ([1, 1], 2)


async def test_a_unary_call_that_is_not_reached_is_sent_again_as_it_was(plane, session) -> None:
    plane.script = in_turn(hang_up)
    await session.abort_plans(whole_tables=True)
    assert plane.requests[0] == plane.requests[1]


async def test_a_step_without_an_answer_ends_at_its_deadline(plane, session) -> None:
    plane.script = never
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        await session.step([], timeout_s=0.2)
    assert time.monotonic() - begin < 5


async def test_an_abandoned_abort_is_left_as_its_result(plane, session) -> None:
    plane.script = in_turn(never)
    with pytest.raises(DeadlineExceededError):
        await session.abort_plans(whole_tables=True, timeout_s=0.1)
    await session.step([])
    (abandoned,) = session.take_abandoned()
    assert (abandoned.number, abandoned.answer) == (1, AbortResult([], plan_of(1)))


async def test_a_step_that_fails_raises_its_error_and_uses_its_number(plane, session) -> None:
    error = InvalidRequestError("is 0", field="operations[0].free")
    plane.script = in_turn(refuse(error, next_number=2))
    with refused(InvalidRequestError, "operations[0].free"):
        await session.step([ops.free([0])])
    assert (await session.step([ops.free([1])])).plan == plan_of(2)
    assert (plane.numbers, plane.streams) == ([1, 2], 1)


async def test_an_answer_to_another_number_is_not_taken(plane, session) -> None:
    """The stream is broken: whether the step ran is learnt on another one."""
    plane.script = in_turn(lambda _: pb.StreamStepsResponse(number=8, step=pb.StepResponse()))
    assert (await session.step([ops.free([])])).plan == plan_of(1)
    assert (plane.numbers, plane.streams) == ([1, 1], 2)


async def test_pushed_news_are_never_taken_for_answers(plane, session) -> None:
    news = pb.News(cut_sequence_ids=columns.pack(columns.INT64, [4]))
    plane.script = lambda request: [
        pb.StreamStepsResponse(news=news),
        pb.StreamStepsResponse(),  # of a kind that this release does not know
        answer_step(request),
    ]
    for number in (1, 2):
        assert (await session.step([ops.free([])])).plan == plan_of(number)
    assert plane.streams == 1


@pytest.mark.parametrize(("as_of_number", "is_told"), [(1, False), (2, True), (0, True)])
async def test_grants_pushed_as_of_a_number_before_an_abort_are_none(
    plane, session, as_of_number: int, is_told: bool
) -> None:
    """0 is said by a control plane that does not know the field."""
    await session.step([ops.free([])])
    await session.abort_plans()
    news = pb.News(granted_sequence_ids=columns.pack(columns.INT64, [4]), as_of_number=as_of_number)
    plane.script = lambda request: [pb.StreamStepsResponse(news=news), answer_step(request)]
    await session.submit_receipts()
    assert await session.wait_for_news(0.0) is is_told


async def test_news_that_come_with_receipts_are_in_the_next_steps_answer(plane, session) -> None:
    def answer(request: Any) -> Any:
        response = answer_step(request)
        if isinstance(request, pb.AbortPlansRequest):
            return response
        cut = columns.pack(columns.INT64, [request.number])
        response.step.news.cut_sequence_ids = cut
        response.step.news.cut_reasons = bytes([pb.CUT_REASON_IDLE])
        response.step.news.granted_sequence_ids = columns.pack(columns.INT64, [10 + request.number])
        response.step.news.granted_num_cached_tokens = bytes(4)
        response.step.news.granted_num_blocks = bytes(4)
        return response

    plane.script = answer
    await session.submit_receipts()
    session.add_receipt(payload(b"r1"))
    await until(lambda: not session._steps.receipts)  # submitted in the background
    result = await session.step([ops.free([])])
    assert result.has_news and list(result.news.cut) == [1, 2, 3]
    assert [grant.sequence_id for grant in result.news.granted] == [11, 12, 13]
    assert list((await session.step([ops.free([])])).news.cut) == [4], "each is told once"
    await session.submit_receipts()
    plane.script = never
    with pytest.raises(DeadlineExceededError):
        await session.abort_plans(timeout_s=0.1)
    plane.script = answer  # to the abort that was given up too, which the step sends again first
    news = (await session.step([ops.free([])])).news
    assert list(news.cut) == [5, 7]
    assert [grant.sequence_id for grant in news.granted] == [17], "the abort has shown the other"


async def test_receipts_go_with_the_next_step_and_stay_until_one_is_answered(
    plane, session
) -> None:
    plane.script = in_turn(refuse(TooManyPlansInFlightError("wait")))
    session.add_receipt(payload(b"r1"))
    with pytest.raises(TooManyPlansInFlightError):
        await session.step([ops.free([])])
    session.add_receipt(payload(b"r2"))
    await session.step([ops.free([])])
    await session.step([ops.free([])])
    sent = [[receipt.payload for receipt in request.receipts] for request in plane.requests]
    assert sent == [[b"r1"], [b"r1", b"r2"], []]


async def test_a_receipt_that_is_refused_does_not_spoil_later_steps(plane, session) -> None:
    plane.script = in_turn(refuse(BadSignatureError("forged", field="receipts[1].signature")))
    session.add_receipt(payload(b"r1"))
    session.add_receipt(payload(b"forged"))
    with pytest.raises(BadSignatureError):
        await session.step([ops.free([])])
    await session.step([ops.free([])])
    assert [receipt.payload for receipt in plane.requests[1].receipts] == [b"r1"]


async def test_receipts_can_be_submitted_without_a_step(plane, session) -> None:
    session.add_receipt(payload(b"r1"))
    deferred = ops.deferred_tokens([1], [1], [0], [1], [5])
    await session.submit_receipts(deferred)
    await session.step([ops.free([])])
    assert [receipt.payload for receipt in plane.requests[0].receipts] == [b"r1"]
    assert plane.requests[0].deferred_tokens == deferred
    assert not plane.requests[1].receipts


async def test_receipts_added_after_a_cancelled_submission_are_submitted_too(
    plane, session
) -> None:
    plane.script = in_turn(never)
    session.add_receipt(payload(b"r1"))
    submission = asyncio.create_task(session.submit_receipts())
    await until(lambda: plane.requests)
    submission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submission
    session.add_receipt(payload(b"r2"))
    await session.submit_receipts()
    sent = [[receipt.payload for receipt in request.receipts] for request in plane.requests]
    assert (sent, plane.numbers) == ([[b"r1"], [b"r1"], [b"r2"]], [1, 1, 2])
    assert session.take_abandoned() == []


async def test_a_run_returns_its_result_or_raises_why_and_keeps_the_plan(plane, session) -> None:
    def answer(request: pb.StepRequest) -> pb.StreamStepsResponse:
        result = pb.StepResponse(plan=plan_of(request.number))
        failure = result.results.add().failures.add(status=pb.ITEM_STATUS_LATER)
        failure.shortage.retry_delay.FromMilliseconds(50)
        return pb.StreamStepsResponse(number=request.number, step=result)

    plane.script = in_turn(answer)
    with pytest.raises(PoolFullError) as caught:
        await session.run(ops.append(1, [2], 1, first_positions=4))
    assert caught.value.retry_delay_s == 0.05
    (abandoned,) = session.take_abandoned()
    assert (abandoned.number, abandoned.answer.plan) == (1, plan_of(1))
    assert list(plane.requests[0].operations) == [ops.append(1, [2], 1, first_positions=4)]
    assert (await session.run(ops.free(1))).plan == plan_of(2)
    assert session.take_abandoned() == []


async def test_sequences_are_admitted_again_with_nothing_computed(plane, session) -> None:
    def answer(request: pb.StepRequest) -> pb.StreamStepsResponse:
        result = pb.StepResponse(plan=plan_of(1))
        result.results.add().admit.num_cached_tokens = 16
        result.results.add().failures.add(status=pb.ITEM_STATUS_LATER)
        return pb.StreamStepsResponse(number=request.number, step=result)

    plane.script = answer
    readmitted = await session.readmit({1: ([7] * 20, 40), 2: ([8] * 20, 40)})
    assert readmitted == {1: 16}
    assert readmitted.plan == plan_of(1)
    first = plane.requests[0].operations[0].admit
    assert (first.sequence_id, first.max_total_tokens) == (1, 40)
    assert first.HasField("num_compute_tokens")
    assert first.num_compute_tokens == 0


async def test_a_wrong_sequence_is_raised_and_the_plan_of_the_others_is_kept(
    plane, session
) -> None:
    def answer(request: pb.StepRequest) -> pb.StreamStepsResponse:
        result = pb.StepResponse(plan=plan_of(1))
        error = to_wire(InvalidRequestError("is empty", field="operations[0].admit.token_ids"))
        result.results.add().failures.add(status=pb.ITEM_STATUS_FAILED, error=error)
        return pb.StreamStepsResponse(number=request.number, step=result)

    plane.script = answer
    with pytest.raises(InvalidRequestError, match="is empty"):
        await session.readmit({1: ([], 0)})
    (abandoned,) = session.take_abandoned()
    assert abandoned.answer.plan == plan_of(1)


async def test_a_session_of_an_earlier_control_plane_has_ended_already(
    session, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse_all(*_: Any) -> Any:
        raise StaleIncarnationError("this is incarnation 6")

    monkeypatch.setattr(ScriptedControlPlane, "CloseSession", refuse_all)
    await session.close()


async def test_a_closed_client_ends_the_calls_that_wait(plane, client) -> None:
    plane.script = never
    session = await client.open_session("p", LAYOUT)
    step = asyncio.create_task(session.step([ops.free([])]))
    look_up = asyncio.create_task(session.list_sequences([1]))
    await until(lambda: len(plane.requests) >= 2)
    await client.close()
    for task in (step, look_up):
        with pytest.raises(CancelledError):
            await asyncio.wait_for(task, 5)
    with pytest.raises(CancelledError):
        await client.list_pools()
