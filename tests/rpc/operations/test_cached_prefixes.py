"""Cached prefixes: which are found, in which tier, and what can be asked of them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from kvplane import ops
from kvplane.wire.columns import fixed
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.v1 import control_pb2 as pb
from tests.helpers.planning.operations_world import DEVICE, HOST, World, plan_of, prompt


async def test_an_admission_finds_the_longest_cached_prefix_of_full_blocks(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    hit = await caller.admit(2, prompt(2, extra=9))
    assert (hit.num_cached_tokens, hit.num_blocks, hit.num_scheduled_tokens) == (16, 4, 9)
    first, second = await caller.table(1), await caller.table(2)
    assert (first[:2] == second[:2], set(first[2:]) & set(second[2:])) == (True, set())
    assert (await world.usage())["held"] == 5
    await caller.do(ops.free([1, 2]))
    assert (await world.usage())["cached"] == 3
    whole = await caller.admit(3, prompt(2, extra=0))
    assert (whole.num_cached_tokens, whole.num_scheduled_tokens) == (15, 1), "the last is computed"
    fresh = await caller.admit(4, prompt(2), skip_prefix_lookup=True, num_compute_tokens=0)
    assert (fresh.num_cached_tokens, fresh.num_scheduled_tokens) == (0, 0)


# The host tier.


async def test_what_would_be_evicted_moves_to_the_host_tier_and_is_found_there(start_world) -> None:
    world = await start_world(num_device_blocks=8)
    caller = await world.caller()
    await caller.cache(prompt(4))
    plan = plan_of(await caller.do(ops.admit(1, prompt(8, seed=1, extra=0))))
    assert list(plan.allocations.tiers) == [HOST] * 4
    assert list(plan.transfers.destination_tiers) == [HOST] * 4
    assert await world.usage(HOST) == {"free": 4, "cached": 4, "held": 0, "retired": 0}
    found = await caller.session.lookup_prefix(prompt(4))
    assert (found.num_cached_tokens, found.num_host_tokens) == (32, 32)
    shortage = await caller.later(ops.admit(2, prompt(4)))
    assert (shortage.tier, shortage.num_blocks_needed) == (DEVICE, 5)
    await caller.do(ops.free(1))
    again = await caller.do(ops.admit(2, prompt(4)))
    assert again.results[0].admit.num_cached_tokens == 32
    assert list(plan_of(again).transfers.source_tiers).count(HOST) == 4
    assert {tier for tier, _, _ in await caller.table(2)} == {DEVICE}
    counters = await world.counters()
    assert counters['hit_tokens_total{tier="host"}'] == 32
    assert counters["demoted_blocks_total"] >= 4


async def test_sequences_come_before_cached_prefixes_in_the_host_tier(start_world) -> None:
    world = await start_world(num_device_blocks=8, num_host_blocks=4)
    caller = await world.caller()
    await caller.cache(prompt(4))
    await caller.admit(1, prompt(8, seed=1, extra=0))
    assert (await world.usage(HOST))["cached"] == 4
    await caller.do(ops.free(1))
    await caller.admit(2, prompt(3, seed=2))
    await caller.do(ops.swap_out(2))
    assert (await world.usage(HOST))["held"] == 4


# Questions.


async def test_a_prefix_is_explained_block_by_block(world, caller) -> None:
    await caller.admit(1, prompt(2))
    await caller.admit(2, prompt(2))
    await caller.session.lookup_prefix(prompt(2))
    blocks = await caller.session.explain_prefix(prompt(3))
    table = await caller.table(1)
    assert [(block.tier, block.index, block.generation) for block in blocks] == list(table[:2])
    assert [(block.ref_count, block.num_hits, block.idle_s) for block in blocks] == [(2, 1, 0)] * 2
    await caller.do(ops.free([1, 2]))
    await asyncio.sleep(0.05)
    for block in await caller.session.explain_prefix(prompt(3)):
        assert (block.ref_count, block.priority) == (0, 0)
        assert block.age_s >= block.idle_s >= 0.04
    assert await caller.session.explain_prefix(prompt(3, seed=1)) == []


async def test_the_longest_match_of_every_pool_is_found_without_a_session(world, caller) -> None:
    other = await world.register(pool_id="other")
    await caller.admit(1, prompt(3))
    before = await world.state()
    matches = await world.client.find_prefix(prompt(3))
    assert [(match.pool_id, match.num_device_tokens) for match in matches] == [
        ("other", 0),
        ("pool", 24),
    ]
    (only,) = await world.client.find_prefix(prompt(3, extra=0), pool_ids=["pool"])
    assert (only.num_device_tokens, only.num_host_tokens) == (24, 0)
    assert only.revision == (await caller.step()).revision
    hashes = fixed((await caller.session.lookup_prefix(prompt(3))).hashes, 16)
    for given, num_tokens in ((hashes, 24), (hashes[:2], 16), (hashes[1:], 0)):
        (match,) = await world.client.find_prefix(hashes=given, pool_ids=["pool"])
        assert match.num_device_tokens == num_tokens
    (match,) = await world.client.find_prefix(hashes=hashes, namespace="lora", pool_ids=["pool"])
    assert match.num_device_tokens == 0, "the hashes are another namespace's"
    assert await world.state() == before
    other.hang_up()


async def refuse(world: World, method: str, request: Any, field: str) -> None:
    """Assert that the question is refused by this field; nothing must have changed."""
    before = await world.state()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await getattr(world.stub, method)(request)
    assert await world.state() == before
    error = from_rpc_error(refused.value)
    told = refused.value.code().name, error.reason, error.field
    assert told == ("INVALID_ARGUMENT", "INVALID_REQUEST", field)


@pytest.mark.parametrize("method", ["LookupPrefix", "ExplainPrefix", "FindPrefix"])
async def test_a_question_that_is_wrong_is_refused_and_the_next_is_answered(
    world, caller, method
) -> None:
    await caller.admit(1, prompt(2))
    request = getattr(pb, f"{method}Request")()
    if method != "FindPrefix":
        request.session.CopyFrom(caller.session.ref)
    negative = ops.pack_tokens([1, 2**31 - 1]) + b"\0\0\0\x80"
    for no_column in (b"", bytes(7), negative):
        request.token_ids = no_column
        await refuse(world, method, request, "token_ids")
    request.token_ids = ops.pack_tokens(prompt(2))
    if method == "FindPrefix":
        wrong = pb.FindPrefixRequest(hashes=bytes(15))
        await refuse(world, method, wrong, "hashes")
        wrong = pb.FindPrefixRequest(token_ids=request.token_ids, namespace="n" * 129)
        await refuse(world, method, wrong, "namespace")
        (answer,) = (await world.stub.FindPrefix(request)).matches
        assert answer.num_device_tokens == 16
    else:
        answer = await getattr(world.stub, method)(request)
        assert answer.num_cached_tokens == 16
