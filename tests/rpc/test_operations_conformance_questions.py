"""Questions about prefixes that are wrong, over a socket: each refusal names the field at fault."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from kvplane import ops
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire.error_codec import from_rpc_error
from tests.helpers.planning.operations_world import POOL, Caller, World, prompt

StartWorld = Callable[..., Awaitable[World]]

INVALID, NOT_FOUND = "INVALID_ARGUMENT", "NOT_FOUND"
BAD_COLUMNS = {
    "no token": b"",
    "part of a token": bytes(7),
    "a negative token": ops.pack_tokens([1, 2**31 - 1]) + b"\0\0\0\x80",
}


@pytest.fixture
async def world(start_world: StartWorld) -> World:
    return await start_world()


@pytest.fixture
async def caller(world: World) -> Caller:
    caller = await world.caller()
    await caller.admit(1, prompt(2))
    return caller


async def refuse(world: World, method: str, request: Any) -> tuple[str, str, str]:
    """Status, reason and field of a refusal; nothing must have changed."""
    before = await world.state()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        call = getattr(world.stub, method)(request)
        await (call.read() if method == "Watch" else call)
    assert await world.state() == before
    error = from_rpc_error(refused.value)
    return refused.value.code().name, error.reason, error.field


@pytest.mark.parametrize("method", ["LookupPrefix", "ExplainPrefix"])
@pytest.mark.parametrize("column", BAD_COLUMNS.values(), ids=BAD_COLUMNS.keys())
async def test_a_prompt_that_is_no_column_of_tokens_is_refused(
    world, caller, method, column
) -> None:
    request = getattr(pb, f"{method}Request")(session=caller.session.ref, token_ids=column)
    refusal = await refuse(world, method, request)
    assert refusal == (INVALID, "INVALID_REQUEST", "token_ids")


@pytest.mark.parametrize("column", BAD_COLUMNS.values(), ids=BAD_COLUMNS.keys())
async def test_a_search_of_all_pools_checks_its_prompt_too(world, caller, column) -> None:
    request = pb.FindPrefixRequest(token_ids=column)
    refusal = await refuse(world, "FindPrefix", request)
    assert refusal == (INVALID, "INVALID_REQUEST", "token_ids")


@pytest.mark.parametrize("method", ["LookupPrefix", "ExplainPrefix"])
async def test_a_session_that_is_not_open_is_named(world, caller, method) -> None:
    ref = caller.session.ref
    unknown = tpb.SessionRef(incarnation=ref.incarnation, session_id=ref.session_id ^ 1)
    earlier = tpb.SessionRef(incarnation=ref.incarnation - 1, session_id=ref.session_id)
    request_of = getattr(pb, f"{method}Request")
    tokens = ops.pack_tokens(prompt(2))
    refusal = await refuse(world, method, request_of(session=unknown, token_ids=tokens))
    assert refusal == (NOT_FOUND, "SESSION_NOT_FOUND", "session.session_id")
    refusal = await refuse(world, method, request_of(session=earlier, token_ids=tokens))
    assert refusal == ("FAILED_PRECONDITION", "STALE_INCARNATION", "session.incarnation")


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("FindPrefix", pb.FindPrefixRequest(token_ids=bytes(4), pool_ids=["x"]), "pool_ids[0]"),
        (
            "FindPrefix",
            pb.FindPrefixRequest(token_ids=bytes(4), pool_ids=[POOL, "x"]),
            "pool_ids[1]",
        ),
        ("Watch", pb.WatchRequest(pool_id="x"), "pool_id"),
        ("DescribePool", pb.DescribePoolRequest(pool_id="x"), "pool_id"),
        ("ListSessions", pb.ListSessionsRequest(pool_id="x"), "pool_id"),
    ],
    ids=["FindPrefix", "FindPrefix, the second", "Watch", "DescribePool", "ListSessions"],
)
async def test_a_pool_that_is_not_there_is_named(world, caller, method, request_, field) -> None:
    assert await refuse(world, method, request_) == (NOT_FOUND, "POOL_NOT_FOUND", field)


@pytest.mark.parametrize("method", ["LookupPrefix", "ExplainPrefix"])
async def test_the_question_after_one_that_was_refused_is_answered(world, caller, method) -> None:
    ref, request_of = caller.session.ref, getattr(pb, f"{method}Request")
    await refuse(world, method, request_of(session=ref, token_ids=bytes(7)))
    request = request_of(session=ref, token_ids=ops.pack_tokens(prompt(2)))
    assert (await getattr(world.stub, method)(request)).num_cached_tokens == 16
