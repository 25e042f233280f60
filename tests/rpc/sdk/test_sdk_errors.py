"""What a servicer raises is what the caller catches: through the interceptor and a real socket."""

from __future__ import annotations

import re

import grpc.aio
import pytest

from kvplane import ControlClient
from kvplane.errors import (
    CODES,
    InternalError,
    KvplaneError,
    PoolNotFoundError,
)
from kvplane.transport.connection import typed_errors
from kvplane.wire.error_codec import from_wire, to_wire
from kvplane.wire.error_messages import REQUEST_ID
from kvplane.wire.v1 import pool_pb2
from tests.helpers.sdk_peers import ScriptedControlPlane, in_turn, raises


async def test_an_error_comes_back_as_it_was_raised(
    plane: ScriptedControlPlane, client: ControlClient
) -> None:
    # An UNAVAILABLE call is tried again, unless the peer's own delay is past the deadline.
    errors = [cls("what happened", field="a.b", retry_delay_s=60) for cls in CODES]
    plane.script = in_turn(*map(raises, errors))
    for error in errors:
        with pytest.raises(KvplaneError) as caught:
            await client.get_pool("p")
        assert type(caught.value) is type(error)
        told = (caught.value.message, caught.value.field, caught.value.retry_delay_s)
        assert told == ("what happened", "a.b", 60)
    assert len(plane.requests) == len(errors)


async def test_a_bug_in_the_server_is_internal_and_tells_nothing_but_where_to_look(
    plane: ScriptedControlPlane, client: ControlClient, caplog: pytest.LogCaptureFixture
) -> None:
    plane.script = raises(ValueError("a secret"))
    with pytest.raises(InternalError) as caught:
        await client.get_pool("p")
    assert "secret" not in str(caught.value)
    assert str(caught.value).endswith(f"has more of request {caught.value.request_id}")
    assert f"request_id={caught.value.request_id} " in caplog.text
    assert "secret" not in caplog.text


async def test_a_refused_call_is_named_in_the_answer_and_in_the_log(
    plane: ScriptedControlPlane, client: ControlClient, caplog: pytest.LogCaptureFixture
) -> None:
    plane.script = raises(PoolNotFoundError("not here", field="pool_id"))
    caplog.set_level("DEBUG", "kvplane.serving.interceptor")
    ids = []
    for _ in range(2):
        with pytest.raises(PoolNotFoundError) as caught:
            await client.get_pool("p")
        ids.append(caught.value.request_id)
    assert re.fullmatch(r"[0-9a-f]{16}", ids[0])
    assert ids[0] != ids[1]
    for request_id in ids:
        assert f"refused request_id={request_id} method=/kvplane.v1" in caplog.text


async def test_the_text_of_a_status_begins_with_the_field(
    plane: ScriptedControlPlane, client: ControlClient
) -> None:
    plane.script = raises(PoolNotFoundError("not here", field="pool_id"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client._pools.GetPool(pool_pb2.GetPoolRequest())
    assert caught.value.details() == "pool_id: not here"


@pytest.mark.parametrize(("given", "is_taken"), [("order-66:a.b", True), ("x" * 65, False)])
async def test_a_caller_may_name_its_call(
    plane: ScriptedControlPlane, client: ControlClient, given: str, is_taken: bool
) -> None:
    plane.script = raises(PoolNotFoundError("not here", field="pool_id"))
    with pytest.raises(PoolNotFoundError) as caught, typed_errors():
        await client._pools.GetPool(pool_pb2.GetPoolRequest(), metadata=(("x-request-id", given),))
    assert (caught.value.request_id == given) is is_taken


def test_an_error_in_a_stream_names_the_call_that_it_answers() -> None:
    token = REQUEST_ID.set("one")
    try:
        wire = to_wire(PoolNotFoundError("not here"))
    finally:
        REQUEST_ID.reset(token)
    assert (wire.request_id, from_wire(wire).request_id) == ("one", "one")
    assert to_wire(PoolNotFoundError("not here")).request_id == ""
