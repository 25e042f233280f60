"""What a servicer raises is what the caller catches: through the interceptor and a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sdk_peers import ScriptedControlPlane, interceptor

from kvplane import ControlClient
from kvplane.errors import (
    CODES,
    DeadlineExceededError,
    InternalError,
    KvplaneError,
    UnavailableError,
)
from kvplane.serving import server as serving
from kvplane.v1 import control_pb2_grpc


@pytest.fixture
async def plane() -> ScriptedControlPlane:
    return ScriptedControlPlane()


@pytest.fixture
async def client(plane: ScriptedControlPlane) -> AsyncIterator[ControlClient]:
    interceptors = [interceptor()]
    server = serving.build("127.0.0.1:0", max_message_bytes=1 << 20, interceptors=interceptors)
    control_pb2_grpc.add_ControlPlaneServiceServicer_to_server(plane, server.grpc_server)
    await server.start([])
    async with ControlClient(server.address, timeout_s=5) as client:
        yield client
    await server.stop(0)


@pytest.mark.parametrize("cls", CODES)
async def test_an_error_comes_back_as_it_was_raised(
    plane: ScriptedControlPlane, client: ControlClient, cls: type[KvplaneError]
) -> None:
    # An UNAVAILABLE call is tried again, unless the peer's own delay is past the deadline.
    raised = cls("what happened", field="operation.token_ids", retry_delay_s=60)

    def script(request: object) -> object:
        raise raised

    plane.script = script
    with pytest.raises(cls) as caught:
        await client.describe_pool("p")
    assert type(caught.value) is cls
    assert caught.value.message == raised.message
    assert caught.value.field == raised.field
    assert caught.value.retry_delay_s == raised.retry_delay_s
    assert len(plane.requests) == 1


async def test_a_bug_in_the_server_is_internal_and_tells_nothing(
    plane: ScriptedControlPlane, client: ControlClient
) -> None:
    def script(request: object) -> object:
        raise ValueError("a secret")

    plane.script = script
    with pytest.raises(InternalError) as caught:
        await client.describe_pool("p")
    assert "secret" not in str(caught.value)


async def test_an_error_of_the_network_has_a_place_in_the_tree_too() -> None:
    async with ControlClient("127.0.0.1:1", timeout_s=0.2) as client:
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            await client.describe_pool("p")
