"""Cached prefixes: which are found, in which tier, and what can be asked of them."""

from __future__ import annotations

import asyncio

import pytest

from kvplane import ops
from kvplane.errors import InvalidRequestError
from kvplane.transport.connection import typed_errors
from kvplane.wire.v1 import prefix_pb2 as pb
from tests.helpers.planning.operations_world import prompt

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


WRONG = {
    "nothing": ({}, "token_ids"),
    "part of a token": ({"token_ids": bytes(7)}, "token_ids"),
    "a negative token": (
        {"token_ids": ops.pack_tokens([1, 2**31 - 1]) + b"\0\0\0\x80"},
        "token_ids",
    ),
    "part of a hash": ({"hashes": bytes(15)}, "hashes"),
    "both": ({"token_ids": bytes(4), "hashes": bytes(16)}, "hashes"),
    "a long namespace": ({"token_ids": bytes(4), "namespace": "n" * 129}, "namespace"),
}


@pytest.mark.parametrize("why", WRONG)
async def test_a_question_that_is_wrong_is_refused_and_the_next_is_answered(
    world, caller, why
) -> None:
    await caller.admit(1, prompt(2))
    fields, field = WRONG[why]

    async def find() -> None:
        with typed_errors():
            await world.stub.FindPrefix(pb.FindPrefixRequest(**fields))

    await caller.denied(find(), InvalidRequestError, field)
    request = pb.FindPrefixRequest(token_ids=ops.pack_tokens(prompt(2)))
    (answer,) = (await world.stub.FindPrefix(request)).matches
    assert answer.num_device_tokens == 16
