"""Cached prefixes: which are found, in which tier, and which requests about prefixes are wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from control_plane import limits
from kvplane import ops
from kvplane.errors import InvalidRequestError, RevisionTooOldError
from kvplane.transport.connection import typed_errors
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.v1 import prefix_pb2 as pb
from kvplane.wire.v1 import prefix_pb2_grpc
from tests.helpers.planning.operations_world import BLOCK, POOL, prompt

Wrong = tuple[str, Any, str]

# The host tier.


async def test_a_prefix_is_explained_block_by_block_and_found_by_hashes(world, caller) -> None:
    await caller.admit(1, prompt(2))
    await caller.admit(2, prompt(2))
    assert (await caller.find(prompt(2)))[0].blocks == (), "nobody asked for them"
    blocks = await caller.blocks(prompt(3))
    assert [(block.tier, block.index, block.generation) for block in blocks] == list(
        (await caller.table(1))[:2]
    )
    assert [(block.ref_count, block.num_hits, block.idle_s) for block in blocks] == [(2, 1, 0)] * 2
    hashes = [block.block_hash for block in blocks]
    for given, num_found in (([*hashes, bytes(16)], 2), (hashes[:1], 1), (hashes[1:], 0)):
        (match,) = await world.client.find_prefix(hashes=given, with_blocks=True)
        assert [block.block_hash for block in match.blocks] == hashes[:num_found]
    (match,) = await world.client.find_prefix(hashes=hashes, namespace="lora")
    assert match.num_device_tokens == 0, "the hashes are another namespace's"
    await caller.do(ops.free([1, 2]))
    await asyncio.sleep(0.05)
    for block in await caller.blocks(prompt(3)):
        assert (block.ref_count, block.priority) == (0, 0)
        assert block.age_s >= block.idle_s >= 0.04


async def test_the_longest_match_of_every_pool_is_found_without_a_session(world, caller) -> None:
    other = await world.register(pool_id="other")
    await caller.admit(1, prompt(3))
    before = world.state()
    matches = await world.client.find_prefix(prompt(3))
    found = {match.pool_id: (match.num_device_tokens, match.num_host_tokens) for match in matches}
    assert found == {"other": (0, 0), "pool": (24, 0)}
    (only,) = await world.client.find_prefix(prompt(3), pool_ids=["pool"])
    assert only.revision == (await caller.step()).revision
    assert world.state() == before
    other.hang_up()


async def test_a_follower_that_is_overrun_is_told_so_on_its_stream(
    world, caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step changes more than is kept."""
    monkeypatch.setattr(limits, "NUM_KEPT_CHANGES", 4)
    call = world.stub.WatchPrefixes(pb.WatchPrefixesRequest(pool_id=POOL))
    while not (await asyncio.wait_for(call.read(), 10)).revision:
        pass
    await caller.admit(1, prompt(5))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await asyncio.wait_for(call.read(), 10)
    assert type(from_rpc_error(ended.value)) is RevisionTooOldError


async def test_followers_of_one_connection_leave_places_to_others(world) -> None:
    calls = []

    async def follow(channel: grpc.aio.Channel) -> None:
        stub: Any = prefix_pb2_grpc.PrefixServiceStub(channel)
        calls.append(stub.WatchPrefixes(pb.WatchPrefixesRequest(pool_id=POOL)))
        await asyncio.wait_for(calls[-1].read(), 10)

    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(world.server.address, options=options) as greedy,
        grpc.aio.insecure_channel(world.server.address, options=options) as other,
    ):
        for _ in range(limits.MAX_WATCHERS - limits.MAX_WATCHERS // 4):
            await follow(greedy)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await follow(greedy)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await follow(other)


# Requests that are wrong: method, request, and the field that the refusal names.

TOKENS, ONE_BLOCK = ops.pack_tokens(prompt(2)), ops.pack_tokens(range(BLOCK))
NEGATIVE = b"\0\0\0\x80"
LATER = pb.ForgetScope.ValueType(9)


def find(field: str, **fields: Any) -> Wrong:
    return "FindPrefix", pb.FindPrefixRequest(**fields), field


def retain(field: str, **fields: Any) -> Wrong:
    """The request is right but for ``fields``."""
    right = {"token_ids": TOKENS, "time_to_live": Duration(seconds=1), "priority": 50}
    return "RetainPrefix", pb.RetainPrefixRequest(pool_id=POOL, **{**right, **fields}), field


def forget(field: str, **fields: Any) -> Wrong:
    """The request is to forget a prefix unless ``fields`` say otherwise."""
    asked = {"pool_id": POOL, "scope": pb.FORGET_SCOPE_PREFIX, **fields}
    return "ForgetPrefixes", pb.ForgetPrefixesRequest(**asked), field


WRONG = {
    "find nothing": find("token_ids"),
    "find part of a token": find("token_ids", token_ids=bytes(7)),
    "find a negative token": find("token_ids", token_ids=TOKENS + NEGATIVE),
    "find part of a hash": find("hashes", hashes=bytes(15)),
    "find by tokens and hashes": find("hashes", token_ids=bytes(4), hashes=bytes(16)),
    "find in a long namespace": find("namespace", token_ids=bytes(4), namespace="n" * 129),
    "retain no tokens": retain("token_ids", token_ids=b""),
    "retain a negative token": retain("token_ids", token_ids=TOKENS + NEGATIVE),
    "retain part of a token": retain("token_ids", token_ids=bytes(7)),
    "retain no tokens any more": retain("token_ids", token_ids=b"", time_to_live=None),
    "retain for no time": retain("time_to_live", time_to_live=Duration()),
    "retain for negative time": retain("time_to_live", time_to_live=Duration(seconds=-1)),
    "retain by priority 0": retain("priority", priority=0),
    "retain by priority 101": retain("priority", priority=101),
    "forget no tokens": forget("token_ids"),
    "forget part of a block": forget("token_ids", token_ids=ONE_BLOCK[:-4]),
    "forget more than a block": forget("token_ids", token_ids=ONE_BLOCK + bytes(4)),
    "forget a negative token": forget("token_ids", token_ids=ONE_BLOCK[:-4] + NEGATIVE),
    "forget in no scope": forget("scope", scope=0),
    "forget in an unknown scope": forget("scope", scope=LATER),
    "forget tokens of a namespace": forget(
        "token_ids", scope=pb.FORGET_SCOPE_NAMESPACE, token_ids=ONE_BLOCK
    ),
    "forget a long namespace": forget(
        "namespace", scope=pb.FORGET_SCOPE_NAMESPACE, namespace="n" * 129
    ),
    "forget in no pool": forget("pool_id", scope=pb.FORGET_SCOPE_TENANT, pool_id=""),
}


@pytest.mark.parametrize("why", WRONG)
async def test_a_request_that_is_wrong_is_refused_by_its_field(world, caller, why) -> None:
    await caller.cache(prompt(2))
    method, request, field = WRONG[why]

    async def call() -> None:
        with typed_errors():
            await getattr(world.stub, method)(request)

    await caller.denied(call(), InvalidRequestError, field)
