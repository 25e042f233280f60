"""Cached prefixes: which are found, in which tier, and what can be asked of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvplane import ops
from kvplane.errors import InvalidRequestError
from kvplane.transport.connection import typed_errors
from kvplane.wire.v1 import prefix_pb2 as pb
from tests.helpers.planning.control_wire import PATIENCE_S
from tests.helpers.planning.operations_world import HOST, prompt


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


async def test_sequences_come_before_cached_prefixes_in_the_host_tier(start_world) -> None:
    world = await start_world(num_device_blocks=8, num_host_blocks=4)
    caller = await world.caller()
    await caller.cache(prompt(4))
    await caller.admit(1, prompt(8, seed=1, extra=0))
    assert (await world.usage(HOST))["cached"] == 4
    await caller.do(ops.free(1))
    await caller.admit(2, prompt(3, seed=2))
    await caller.do(ops.swap(2, "host"))
    assert (await world.usage(HOST))["held"] == 4


# Questions.


async def test_a_prefix_is_explained_block_by_block(world, caller) -> None:
    await caller.admit(1, prompt(2))
    await caller.admit(2, prompt(2))
    assert (await caller.find(prompt(2)))[0].blocks == (), "nobody asked for them"
    blocks = await caller.blocks(prompt(3))
    table = await caller.table(1)
    hashes = [block.block_hash for block in blocks]
    (by_hashes,) = await world.client.find_prefix(
        hashes=[*hashes, bytes(16)], pool_ids=["pool"], with_blocks=True
    )
    assert [block.block_hash for block in by_hashes.blocks] == hashes
    assert [(block.tier, block.index) for block in by_hashes.blocks] == [
        (block.tier, block.index) for block in blocks
    ]
    assert [(block.tier, block.index, block.generation) for block in blocks] == list(table[:2])
    assert [(block.ref_count, block.num_hits, block.idle_s) for block in blocks] == [(2, 1, 0)] * 2
    await caller.do(ops.free([1, 2]))
    await asyncio.sleep(0.05)
    for block in await caller.blocks(prompt(3)):
        assert (block.ref_count, block.priority) == (0, 0)
        assert block.age_s >= block.idle_s >= 0.04
    assert await caller.blocks(prompt(3, seed=1)) == ()


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
    hashes = [block.block_hash for block in await caller.blocks(prompt(3))]
    for given, num_tokens in ((hashes, 24), (hashes[:2], 16), (hashes[1:], 0)):
        (match,) = await world.client.find_prefix(hashes=given, pool_ids=["pool"])
        assert match.num_device_tokens == num_tokens
    (match,) = await world.client.find_prefix(hashes=hashes, namespace="lora", pool_ids=["pool"])
    assert match.num_device_tokens == 0, "the hashes are another namespace's"
    assert await world.state() == before
    other.hang_up()


async def test_searches_of_many_pools_take_turns(
    world, caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pool takes a slice; after its first, the first search waits until another runs."""
    monkeypatch.setattr("control_plane.prefixes._SLICE_BLOCKS", 1)
    others = [await world.register(pool_id=f"pool-{i}") for i in range(3)]
    await caller.admit(1, prompt(2))
    core, running, most = world.server.core, 0, 0
    original = core.find_prefix

    def counted(*args: Any) -> Iterator[None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        slices = original(*args)
        try:
            while True:
                try:
                    next(slices)
                except StopIteration as end:
                    return end.value
                yield
                while most == 1 and time.monotonic() < give_up_s:
                    yield
        finally:
            running -= 1

    monkeypatch.setattr(core, "find_prefix", counted)
    give_up_s = time.monotonic() + PATIENCE_S
    answers = await asyncio.gather(*(world.client.find_prefix(prompt(2)) for _ in range(4)))
    assert most > 1, "others come between two slices"
    assert [each.num_device_tokens for each in answers[0]] == [16, 0, 0, 0]
    assert answers == [answers[0]] * 4
    for other in others:
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
