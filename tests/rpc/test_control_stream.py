"""Steps on a stream: answered one by one in order, refused in the stream and never by its end, safe
to repeat over any stream.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from control_plane.server.server import ControlPlaneServer
from kvplane import ops
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.control_wire import PATIENCE_S, RawSession

OK, NEVER = pb.ITEM_STATUS_UNSPECIFIED, pb.ITEM_STATUS_NEVER


class Steps:
    """A StreamSteps stream of a session."""

    def __init__(self, session: RawSession) -> None:
        self.session = session
        self.call: Any = session.stub.StreamSteps()

    async def send(self, *operations: pb.Operation, **more: Any) -> None:
        fields = {"session": self.session.ref, "operations": operations, **more}
        await self.call.write(pb.StreamStepsRequest(step=pb.StepRequest(**fields)))

    async def receive(self) -> pb.StreamStepsResponse:
        answer = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        assert isinstance(answer, pb.StreamStepsResponse), await self.call.details()
        return answer

    async def step(self, *operations: pb.Operation, **more: Any) -> pb.StreamStepsResponse:
        """The next step, with the receipts that are due; what is answered counts as run."""
        await self.send(*operations, **{**self.session.next(), **more})
        answer = await self.receive()
        if answer.HasField("step"):
            self.session.ran(answer.step)
        return answer

    async def refusal(self, *operations: pb.Operation, **more: Any) -> tuple[int, str, str]:
        """Number, reason and field of the error that answers a step."""
        await self.send(*operations, **more)
        answer = await self.receive()
        assert answer.HasField("error")
        return answer.number, answer.error.reason, answer.error.field


@pytest.fixture
async def steps(session: RawSession) -> Steps:
    return Steps(session)


def statuses(answer: pb.StreamStepsResponse) -> list[int]:
    """Of operations of one item each."""
    return [result.failures[0].status if result.failures else OK for result in answer.step.results]


async def test_a_step_that_is_wrong_as_a_whole_is_refused_in_the_stream(steps: Steps) -> None:
    refusal, ref = steps.refusal, steps.session.ref
    assert await refusal(number=0) == (0, "INVALID_REQUEST", "number")
    assert await refusal(number=-1) == (-1, "INVALID_REQUEST", "number")
    assert await refusal(number=2) == (2, "STEP_OUT_OF_ORDER", "number")
    unknown = tpb.SessionRef(incarnation=ref.incarnation, session_id=ref.session_id ^ 1)
    missing = await refusal(session=unknown, number=1)
    assert missing == (1, "SESSION_NOT_FOUND", "session.session_id")
    assert statuses(await steps.step(ops.admit(1, [1, 2]))) == [OK]


async def test_bytes_that_are_no_request_are_refused_and_the_stream_goes_on(
    control_server: ControlPlaneServer, session: RawSession
) -> None:
    async with grpc.aio.insecure_channel(control_server.address) as channel:
        call: Any = channel.stream_stream("/kvplane.v1.SessionService/StreamSteps")()
        for garbage in (b"\xff\xff\xff", b"\x1a\xff\xff\xff\xff\x0f", b"\x0a"):
            await call.write(garbage)
            answer = pb.StreamStepsResponse.FromString(await call.read())
            assert (answer.number, answer.error.reason) == (0, "INVALID_REQUEST")
        operation = ops.admit(1, [1])
        step = pb.StepRequest(session=session.ref, number=1, operations=[operation])
        request = pb.StreamStepsRequest(step=step)
        await call.write(request.SerializeToString()[:-1])
        assert pb.StreamStepsResponse.FromString(await call.read()).HasField("error")
        await call.write(request.SerializeToString())
        assert statuses(pb.StreamStepsResponse.FromString(await call.read())) == [OK]


async def test_a_stream_ends_when_its_client_has_no_more_to_say(steps: Steps) -> None:
    await steps.step(ops.admit(1, [1]))
    await steps.call.done_writing()
    assert await asyncio.wait_for(steps.call.code(), PATIENCE_S) is grpc.StatusCode.OK
