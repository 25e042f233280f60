"""A request is the same whatever encoding its caller chose of those that protobuf allows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import pytest

from kvplane.v1 import session_pb2, types_pb2
from tests.helpers.encodings import ENCODINGS, encode
from tests.helpers.planning.control_wire import RawSession
from tests.helpers.planning.operations_world import World

Send = Callable[[bytes], Awaitable[session_pb2.StepResponse]]


@pytest.fixture
async def send(world: World) -> AsyncIterator[Send]:
    """Sends the bytes of a StepRequest."""
    async with grpc.aio.insecure_channel(world.server.address) as channel:
        yield channel.unary_unary(
            "/kvplane.v1.SessionService/Step",
            response_deserializer=session_pb2.StepResponse.FromString,
        )


@pytest.fixture
async def session(world: World) -> RawSession:
    return await RawSession.open(world.stub, world.shard)


def request(
    session: RawSession, number: int, *operations: session_pb2.Operation
) -> session_pb2.StepRequest:
    ref = types_pb2.SessionRef.FromString(session.ref.SerializeToString())
    return session_pb2.StepRequest(session=ref, number=number, operations=operations)


def admit(sequence_id: int, *forks: int) -> session_pb2.Operation:
    admitted = session_pb2.Admit(
        sequence_id=sequence_id, token_ids=range(20), fork_sequence_ids=forks
    )
    return session_pb2.Operation(admit=admitted)


async def test_every_encoding_of_a_step_is_the_same_step(send: Send, session: RawSession) -> None:
    """A repeat in another encoding is known by its content."""
    first = request(session, 1, admit(1, 2), admit(3))
    answer = await send(encode(first, "unpacked"))
    assert [done.admit.num_blocks for done in answer.results] == [3, 3]
    for other in ENCODINGS:
        assert await send(encode(first, other)) == answer
    assert await send(first.SerializeToString()) == answer
