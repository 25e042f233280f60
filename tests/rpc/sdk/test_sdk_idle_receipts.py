"""The last receipt of an engine that has nothing more to compute is submitted by the client."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from control_plane.server.server import ControlPlaneServer
from kvplane import ControlClient, Session, ops
from kvplane.errors import BadSignatureError, PlaneUnavailableError, QuotaExceededError
from kvplane.session import session as sessions
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.planning.control_wire import RawShard
from tests.helpers.planning.registration_messages import LAYOUT as SMALL_LAYOUT
from tests.helpers.sdk_peers import (
    ScriptedControlPlane,
    answer_step,
    in_turn,
    payload,
    plan_of,
    raises,
)
from tests.helpers.waiting import until


async def while_idle() -> None:
    """Long enough for a submission that must not come."""
    await asyncio.sleep(4 * sessions.IDLE_S)


def submissions(plane: ScriptedControlPlane) -> list[list[bytes]]:
    return [
        [receipt.payload for receipt in request.receipts]
        for request in plane.requests
        if isinstance(request, pb.StepRequest) and not request.operations
    ]


async def test_what_an_idle_engine_wrote_is_found_by_others_without_a_step(
    control_server: ControlPlaneServer, shard: RawShard
) -> None:
    async with (
        ControlClient(control_server.address) as client,
        await client.open_session("pool", SMALL_LAYOUT) as session,
    ):
        prompt = list(range(1, 21))
        session.add_receipt(shard.receipt((await session.run(ops.admit(1, prompt))).plan))
        observe = control_server.core.observe_pool
        await until(lambda: observe("pool").counters.num_publications == 2)
        (match,) = await client.find_prefix(prompt)
        assert match.num_cached_tokens == 16


async def test_the_last_receipt_is_submitted_once_under_the_next_number(plane, session) -> None:
    await session.step([ops.free([])])
    session.add_receipt(payload(b"r1"))
    session.add_receipt(payload(b"r2"))
    await until(lambda: submissions(plane))
    await while_idle()
    assert submissions(plane) == [[b"r1", b"r2"]]
    assert session.last_number == 1, "that of the caller's own calls"
    assert (await session.step([ops.free([])])).plan == plan_of(3)
    assert plane.numbers == [1, 2, 3]


async def test_an_engine_that_goes_on_pays_for_no_further_call(plane, session) -> None:
    for number in range(1, 6):
        await session.step([ops.free([])])
        session.add_receipt(payload(b"r%d" % number))
        await asyncio.sleep(sessions.IDLE_S / 5)
    assert submissions(plane) == []
    assert [len(request.receipts) for request in plane.requests] == [0, 1, 1, 1, 1]


async def test_one_that_got_no_answer_is_sent_again_as_it_was(plane, session, monkeypatch) -> None:
    monkeypatch.setattr(sessions, "_RETRY_S", 0.01)
    plane.script = in_turn(
        raises(PlaneUnavailableError("gone")),
        raises(QuotaExceededError("too many calls", retry_delay_s=0.01)),
    )
    session.add_receipt(payload(b"r1"))
    await until(lambda: len(plane.requests) == 3)
    assert plane.requests[0] == plane.requests[1] == plane.requests[2]
    await session.step([ops.free([])])
    assert plane.numbers == [1, 1, 1, 2]


async def test_a_refused_receipt_is_dropped_and_the_others_follow(plane, session, caplog) -> None:
    plane.script = in_turn(raises(BadSignatureError("forged", field="receipts[0].signature")))
    session.add_receipt(payload(b"forged"))
    session.add_receipt(payload(b"r1"))
    await until(lambda: len(plane.requests) == 2)
    assert submissions(plane) == [[b"forged", b"r1"], [b"r1"]]
    assert "receipts not submitted: receipts[0].signature: forged" in caplog.text


async def test_a_detached_session_submits_nothing_more(plane, session) -> None:
    session.add_receipt(payload(b"r1"))
    await session.detach()
    await while_idle()
    assert plane.requests == []


# Each takes some seconds.
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.nightly) for i in (1, 2))])
async def test_every_number_has_one_content_however_calls_and_submissions_meet(
    plane: ScriptedControlPlane, session: Session, monkeypatch: Any, seed: int
) -> None:
    """Steps are given up and made again, answers are lost, and receipts come at any time."""
    monkeypatch.setattr(sessions, "IDLE_S", 0.0)
    monkeypatch.setattr(sessions, "_RETRY_S", 0.001)
    rng = random.Random(seed)
    contents: list[Any] = []
    received: set[bytes] = set()

    async def answer(request: Any) -> Any:
        assert request.number in (len(contents), len(contents) + 1), "out of order"
        if request.number > len(contents):
            contents.append(request)
        assert contents[-1] == request, "a number came again with other content"
        received.update(receipt.payload for receipt in request.receipts)
        await asyncio.sleep(rng.choice([0, 0, 0.002]))
        if rng.random() < 0.2:
            raise PlaneUnavailableError("the answer is lost")
        return answer_step(request)

    plane.script = answer
    done: list[bytes] = []
    for number in range(60):
        step = asyncio.create_task(session.step([ops.free([number + 1])]))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice([0, 0.001, 0.003]))
            step.cancel()
            await asyncio.wait([step])
            await asyncio.sleep(rng.choice([0, 0.003]))
            if step.cancelled():
                step = asyncio.create_task(session.step([ops.free([number + 1])]))
        done.append((await step).plan.payload)
        session.add_receipt(payload(b"r%d" % number))
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.004]))
    await until(lambda: len(received) == 60)
    steps = [request for request in contents if isinstance(request, pb.StepRequest)]
    freed = [request.operations[0] for request in steps if request.operations]
    assert freed == [ops.free([number + 1]) for number in range(60)]
    assert len(set(done)) == 60
    assert len(contents) > 60, "no receipt was submitted by itself"
