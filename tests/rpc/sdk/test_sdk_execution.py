"""Executions over bad networks: a plan goes on where it was."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvplane import Execution, Tensor
from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    KvplaneError,
    PlanOutOfOrderError,
    QuotaExceededError,
    StaleEpochError,
)
from kvplane.wire.error_codec import to_wire
from kvplane.wire.v1 import execution_pb2 as pb
from tests.helpers.refusals import refused
from tests.helpers.sdk_peers import (
    ScriptedDataPlane,
    answer_execution,
    hang_up,
    never,
    payload,
    plan_of,
)
from tests.helpers.waiting import until

QUERY = Tensor("float32", (2, 1, 8), bytes(range(64)))
KV = Tensor("float32", (2, 1, 8), bytes(64))


def on(kind: str, act: Any, *, layer: int = 0) -> Any:
    """A script that does ``act`` with the first request of a kind, and answers all others."""
    waiting = [act]

    def script(request: Any) -> Any:
        is_it = isinstance(request, pb.ExecuteRequest) and request.WhichOneof("message") == kind
        if is_it and request.layer.layer == layer and waiting:
            return waiting.pop()(request)
        return answer_execution(request)

    return script


def refusing(error: KvplaneError) -> Any:
    """A script that answers with an error in the stream."""
    return lambda _: [pb.ExecuteResponse(error=to_wire(error))]


@pytest.fixture
def plane(data_plane: ScriptedDataPlane) -> ScriptedDataPlane:
    return data_plane


@pytest.fixture(params=[False, True], ids=["start", "begin"])
def begins(request: pytest.FixtureRequest) -> bool:
    """Whether plans are sent without waiting for their answers."""
    wanted: bool = request.param
    return wanted


async def present(execution: Execution, begins: bool, number: int = 1, **more: Any) -> None:
    if begins:
        await execution.begin(plan_of(number), 2, **more)
    else:
        await execution.start(plan_of(number), **more)


async def run(execution: Execution, *layers: int) -> None:
    """Run these layers, or all, whose output is their query."""
    for index in layers or execution.layers:
        assert await execution.layer(index, QUERY, KV, KV) == QUERY


async def test_a_plan_runs_layer_by_layer_to_its_receipt(plane, execution) -> None:
    assert execution.layers == [0, 1, 2]
    await execution.start(plan_of(1))
    assert (execution.num_tokens, execution.has_run) == (2, False)
    await run(execution, 0, 1)
    assert not execution.receipts
    await run(execution, 2)
    assert execution.receipts == [payload(b"receipt")]
    assert plane.kinds == ["open", "plan", "layer", "layer", "layer"]


async def test_a_plan_and_its_first_layer_travel_without_waiting(plane, execution) -> None:
    """Neither is waited for while the plan is not answered."""
    may_answer = asyncio.Event()

    async def answer_late(request: Any) -> Any:
        await may_answer.wait()
        return answer_execution(request)

    plane.script = on("plan", answer_late)
    await execution.begin(plan_of(1), 2)
    first = asyncio.create_task(execution.layer(0, QUERY, KV, KV))
    await asyncio.sleep(0.05)
    assert not first.done()
    may_answer.set()
    assert await first == QUERY
    await run(execution, 1, 2)
    assert execution.receipts == [payload(b"receipt")]
    assert plane.kinds == ["open", "plan", "layer", "layer", "layer"]


async def test_a_plan_that_was_begun_and_is_refused_is_refused_at_each_layer(
    plane, execution
) -> None:
    plane.script = refusing(StaleEpochError("another process"))
    await execution.begin(plan_of(1), 2)
    for _ in range(2):
        with pytest.raises(StaleEpochError):
            await execution.layer(0, QUERY, KV, KV)
    plane.script = answer_execution
    await execution.start(plan_of(2))
    await run(execution)


async def test_a_plan_that_was_begun_computes_what_its_caller_said(plane, execution) -> None:
    await execution.begin(plan_of(1), 3)
    with pytest.raises(InternalError, match="2 tokens, not 3"):
        await execution.layer(0, QUERY, KV, KV)


async def test_a_stream_that_breaks_in_a_pass_presents_the_pass_again(
    plane, execution, begins
) -> None:
    plane.script = on("layer", hang_up)
    await present(execution, begins, pass_index=3)
    await run(execution, 0)
    assert plane.kinds == ["open", "plan", "layer", "open", "plan", "layer"]
    presented = [each for each in plane.requests if each.HasField("plan")]
    assert [each.plan.pass_index for each in presented] == [3, 3]
    layers = [each.layer for each in plane.requests if each.HasField("layer")]
    assert [(layer.plan_number, layer.pass_index) for layer in layers] == [(1, 3), (1, 3)]


async def test_each_layer_names_the_plan_that_was_presented(plane, execution, begins) -> None:
    for number in (1, 2):
        await present(execution, begins, number)
        await run(execution)
    layers = [each.layer for each in plane.requests if each.HasField("layer")]
    assert [layer.plan_number for layer in layers] == [1, 1, 1, 2, 2, 2]
    assert not any(layer.HasField("pass_index") for layer in layers)


async def test_what_is_begun_has_to_be_a_plan(execution) -> None:
    with refused(InvalidRequestError, "plan.payload"):
        await execution.begin(payload(b"no plan"), 2)


async def test_a_plan_that_was_begun_and_dropped_answers_for_no_other(execution) -> None:
    await execution.begin(plan_of(1), 2)
    await execution.start(plan_of(2))
    assert execution.num_tokens == 2
    await run(execution, 0)


async def test_options_of_attention_travel_with_the_layer(plane, execution) -> None:
    await execution.start(plan_of(1))
    options = AttentionOptions(scale=0.5, sliding_window_tokens=4, alibi_slopes=(0.25,))
    await execution.layer(0, QUERY, KV, KV, options=options)
    travelled = plane.requests[-1].layer.options
    assert AttentionOptions.from_proto(travelled, field="options") == options


async def test_a_plan_without_spans_brings_its_receipt_at_once(plane, execution) -> None:
    started = pb.StartPlanResponse(plan_number=1, receipt=payload(b"receipt"))
    plane.script = on("plan", lambda _: [pb.ExecuteResponse(started=started)])
    await execution.start(plan_of(1))
    assert execution.receipts == [payload(b"receipt")]


async def test_a_stream_that_breaks_goes_on_where_it_was(plane, execution) -> None:
    plane.script = on("plan", hang_up)
    await execution.start(plan_of(1))
    assert plane.kinds == ["open", "plan", "open", "plan"]
    plane.script = on("layer", hang_up, layer=1)
    await run(execution)
    assert plane.kinds[4:] == ["layer", "layer", "open", "plan", "layer", "layer"]
    assert [r.layer.layer for r in plane.requests if r.HasField("layer")] == [0, 1, 1, 2]
    assert execution.receipts == [payload(b"receipt")]


class RunsOnce:
    """A script of a data plane that remembers whether its plan has run; ``act`` is done once, in
    place of the last layer's answer.
    """

    def __init__(self, act: Any) -> None:
        self._act: Any = act
        self._has_run = False

    def __call__(self, request: pb.ExecuteRequest) -> Any:
        receipt = payload(b"receipt")
        kind = request.WhichOneof("message")
        if kind == "plan" and self._has_run:
            started = pb.StartPlanResponse(
                plan_number=1, num_tokens=2, finished=True, receipt=receipt
            )
            return [pb.ExecuteResponse(started=started)]
        if kind == "layer" and self._has_run:
            (answer,) = answer_execution(request)
            answer.output.receipt.CopyFrom(receipt)
            return [answer]
        if kind == "layer" and request.layer.layer == 2:
            self._has_run = True
            return self._act(request)
        return answer_execution(request)


async def test_a_last_layers_lost_answer_is_got_by_the_same_layer(plane, execution) -> None:
    """The plan has run: the layer, sent again, is answered with its output and the receipt."""
    plane.script = RunsOnce(hang_up)
    await execution.start(plan_of(1))
    await run(execution)
    assert execution.receipts == [payload(b"receipt")]
    assert plane.kinds == ["open", "plan", *["layer"] * 3, "open", "plan", "layer"]


async def test_every_layer_of_a_plan_that_has_run_can_be_had_again(plane, execution) -> None:
    plane.script = RunsOnce(answer_execution)
    await execution.start(plan_of(1))
    await run(execution, *execution.layers, 1, 0, 2)
    await execution.start(plan_of(1))
    assert execution.receipts == [payload(b"receipt")]
    await run(execution, 1)
    assert plane.kinds.count("open") == 1


async def test_a_layer_that_is_refused_raises_and_can_be_sent_right(plane, execution) -> None:
    error = InvalidRequestError("must be [2, 1, 8]", field="layer.key.shape")
    plane.script = on("layer", refusing(error))
    await execution.start(plan_of(1))
    with refused(InvalidRequestError, "layer.key.shape"):
        await execution.layer(0, QUERY, KV, KV)
    await run(execution, 0)
    assert plane.kinds.count("open") == 1


async def test_a_plan_that_is_refused_is_not_started(plane, execution) -> None:
    plane.script = on("plan", refusing(StaleEpochError("another process")))
    with pytest.raises(StaleEpochError):
        await execution.start(plan_of(1))
    with pytest.raises(PlanOutOfOrderError):
        await execution.layer(0, QUERY, KV, KV)


async def test_a_layer_without_an_answer_ends_and_does_not_answer_for_the_next(
    plane, execution
) -> None:
    """At its deadline, or when it is cancelled."""
    plane.script = on("layer", never)
    await execution.start(plan_of(1))
    with pytest.raises(DeadlineExceededError):
        await execution.layer(0, QUERY, KV, KV, timeout_s=0.2)
    await run(execution, 0)
    plane.script, num_requests = on("layer", never, layer=1), len(plane.requests)
    layer = asyncio.create_task(execution.layer(1, QUERY, KV, KV))
    await until(lambda: len(plane.requests) != num_requests)
    layer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await layer
    await run(execution, 1)
    assert await execution.layer(2, KV, KV, KV) == KV


def another_layer(answer: pb.ExecuteResponse) -> None:
    answer.output.layer = 1


def another_plan(answer: pb.ExecuteResponse) -> None:
    answer.started.plan_number = 7


def half_an_output(answer: pb.ExecuteResponse) -> None:
    answer.output.output.data = b"short"


@pytest.mark.parametrize(
    ("kind", "spoil", "text"),
    [
        ("layer", another_layer, "layer 0 was answered as 1"),
        ("layer", half_an_output, r"output\.data"),
        ("plan", another_plan, "plan 1 was started as plan 7"),
    ],
    ids=["another layer", "malformed", "another plan"],
)
async def test_what_is_answered_wrongly_is_the_planes_fault(
    plane, execution, kind, spoil, text
) -> None:
    def answer(request: Any) -> Any:
        (right,) = answer_execution(request)
        spoil(right)
        return [right]

    plane.script = on(kind, answer)
    await execution.begin(plan_of(1), 2)
    with pytest.raises(InternalError, match=text):
        await execution.layer(0, QUERY, KV, KV)


async def test_a_layer_without_a_query_has_an_output_without_elements(plane, execution) -> None:
    await execution.start(plan_of(1))
    assert (await execution.layer(0, None, KV, KV)).num_elements == 0
    assert not plane.requests[-1].layer.HasField("query")


async def test_an_execution_waits_where_too_many_bytes_wait(plane, execution) -> None:
    """As much as its deadline allows."""
    plane.script = on("layer", refusing(QuotaExceededError("too many", retry_delay_s=0.01)))
    await execution.start(plan_of(1))
    await run(execution, 0)
    error = QuotaExceededError("too many bytes", retry_delay_s=10.0)
    plane.script = on("layer", refusing(error), layer=1)
    with pytest.raises(QuotaExceededError):
        await execution.layer(1, QUERY, KV, KV, timeout_s=0.5)
