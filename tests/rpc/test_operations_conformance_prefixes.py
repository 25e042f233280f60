"""Cached prefixes, over a socket: in which tier they are found, which are kept and which forgotten,
and what can be asked of them. A refusal changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from kvplane import ops
from kvplane.errors import (
    BlockInUseError,
    InvalidRequestError,
    PoolNotFoundError,
    QuotaExceededError,
)
from kvplane.wire.columns import fixed
from tests.helpers.planning.operations_world import DEVICE, HOST, Caller, World, plan_of, prompt

StartWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def world(start_world: StartWorld) -> World:
    return await start_world()


@pytest.fixture
async def caller(world: World) -> Caller:
    return await world.caller()


@pytest.fixture
async def alone(start_world: StartWorld) -> Caller:
    """The caller of a pool of eight device blocks and no host tier."""
    return await (await start_world(num_device_blocks=8, num_host_blocks=0)).caller()


async def cache(caller: Caller, token_ids: Sequence[int], **how: bool) -> None:
    """Leave the prompt's full blocks cached."""
    await caller.admit(12, token_ids, **how)
    await caller.do(ops.free([12]))


# Promotion.


async def test_the_second_of_two_equal_blocks_keeps_the_prefix_alive(alone) -> None:
    await alone.admit(1, prompt(2, extra=0))
    await alone.admit(2, prompt(2), skip_prefix_lookup=True)
    await alone.do(ops.free([1]))
    await alone.admit(3, prompt(5, seed=1, extra=0))  # evicts the first two
    assert await alone.num_cached(prompt(2)) == 16
    assert (await alone.admit(4, prompt(2, extra=0), num_compute_tokens=0)).num_blocks == 2


async def test_equal_prompts_of_one_step_share_their_blocks(world, caller) -> None:
    result = await caller.do(ops.admit(1, prompt(2)), ops.admit(2, prompt(2)))
    assert (await world.usage())["held"] <= 4
    assert (await caller.table(1))[:2] == (await caller.table(2))[:2]
    assert plan_of(result).spans.num_tokens


async def test_equal_prompts_share_while_the_first_is_computed(world, caller) -> None:
    """The step after the first one's, whose receipt has not come yet."""
    first = await caller.session.step([ops.admit(1, prompt(2))])
    second = await caller.session.step([ops.admit(2, prompt(2))])
    assert (await caller.table(1))[:2] == (await caller.table(2))[:2]
    for result in (first, second):
        caller.session.add_receipt(world.shard.receipt(result.plan))
    await caller.session.submit_receipts()
    assert (await world.usage())["held"] == 4


# The host tier.


async def test_what_would_be_evicted_moves_to_the_host_tier_and_is_found_there(
    start_world: StartWorld,
) -> None:
    world = await start_world(num_device_blocks=8)
    caller = await world.caller()
    await cache(caller, prompt(4))
    result = await caller.do(ops.admit(1, prompt(8, seed=1, extra=0)))
    plan = plan_of(result)
    assert list(plan.allocations.tiers) == [HOST] * 4
    assert list(plan.transfers.destination_tiers) == [HOST] * 4
    assert await world.usage(HOST) == {"free": 4, "cached": 4, "held": 0, "retired": 0}
    found = await caller.session.lookup_prefix(prompt(4))
    assert (found.num_cached_tokens, found.num_host_tokens) == (32, 32)
    await caller.do(ops.free([1]))
    again = await caller.do(ops.admit(2, prompt(4)))
    assert again.results[0].admit.num_cached_tokens == 32
    assert list(plan_of(again).transfers.source_tiers).count(HOST) == 4
    assert {tier for tier, _, _ in await caller.table(2)} == {DEVICE}
    counters = await world.counters()
    assert counters.num_host_hit_tokens == 32
    assert counters.num_demoted_blocks >= 4


async def test_a_hit_in_the_host_tier_needs_room_on_the_device(start_world: StartWorld) -> None:
    caller = await (await start_world(num_device_blocks=8)).caller()
    await cache(caller, prompt(4))
    await caller.admit(1, prompt(8, seed=1, extra=0))
    shortage = await caller.later(ops.admit(2, prompt(4)))
    assert (shortage.tier, shortage.num_blocks_needed) == (DEVICE, 5)
    assert (await caller.session.lookup_prefix(prompt(4))).num_host_tokens == 32


async def test_sequences_come_before_cached_prefixes_in_the_host_tier(
    start_world: StartWorld,
) -> None:
    world = await start_world(num_device_blocks=8, num_host_blocks=4)
    caller = await world.caller()
    await cache(caller, prompt(4))
    await caller.admit(1, prompt(8, seed=1, extra=0))
    assert (await world.usage(HOST))["cached"] == 4
    await caller.do(ops.free([1]))
    await caller.admit(2, prompt(3, seed=2))
    await caller.do(ops.swap_out([2]))
    assert (await world.usage(HOST))["held"] == 4


# Retention.


async def test_what_is_retained_is_evicted_last_and_by_its_priority(alone) -> None:
    await cache(alone, prompt(2))
    await cache(alone, prompt(2, seed=1))
    await cache(alone, prompt(2, seed=2))
    kept = await alone.do(ops.retain(prompt(2), time_to_live_s=60, priority=90))
    assert kept.plan is None
    retained = kept.results[0].retain
    assert (retained.num_retained_blocks, retained.num_retained_tokens) == (2, 16)
    await alone.admit(1, prompt(6, seed=3, extra=0))
    assert await alone.num_cached(prompt(2)) == 16
    assert await alone.num_cached(prompt(2, seed=1)) == 0
    assert await alone.num_cached(prompt(2, seed=2)) == 0


async def test_a_lower_priority_goes_first(start_world: StartWorld) -> None:
    world = await start_world(num_device_blocks=8, num_host_blocks=0, max_retained_share=1.0)
    caller = await world.caller()
    for seed, priority in ((0, 90), (1, 10), (2, 50)):
        await cache(caller, prompt(2, seed))
        await caller.do(ops.retain(prompt(2, seed), time_to_live_s=60, priority=priority))
    await caller.admit(1, prompt(4, seed=3, extra=0))
    assert [await caller.num_cached(prompt(2, seed)) for seed in range(3)] == [16, 0, 16]


async def test_retention_is_never_kept_from_a_sequence(alone) -> None:
    await cache(alone, prompt(2))
    await alone.do(ops.retain(prompt(2), time_to_live_s=60, priority=100))
    await alone.admit(1, prompt(8, seed=1, extra=0))
    assert await alone.num_cached(prompt(2)) == 0


async def test_retention_ends_by_its_time_or_by_a_release(alone) -> None:
    await cache(alone, prompt(1))
    await cache(alone, prompt(1, seed=1))
    for seed, time_to_live_s in ((0, 0.1), (1, 60)):
        await alone.do(ops.retain(prompt(1, seed), time_to_live_s=time_to_live_s))
    (first,) = await alone.session.explain_prefix(prompt(1, seed=1))
    assert first.priority == ops.DEFAULT_PRIORITY
    for num_released in (1, 0):
        released = await alone.do(ops.release(prompt(1, seed=1)))
        assert released.results[0].release.num_released_blocks == num_released
    await asyncio.sleep(0.2)
    for seed in (0, 1):
        (block,) = await alone.session.explain_prefix(prompt(1, seed))
        assert block.priority == 0


async def test_what_is_not_cached_is_not_retained(alone) -> None:
    await cache(alone, prompt(1))
    result = await alone.do(ops.retain(prompt(3), time_to_live_s=60))
    assert result.results[0].retain.num_retained_blocks == 1


async def test_a_tenant_retains_only_so_much(alone) -> None:
    """A quarter of the pool's device blocks by default."""
    await cache(alone, prompt(2))
    await cache(alone, prompt(2, seed=1))
    await alone.do(ops.retain(prompt(2), time_to_live_s=60))
    more = ops.retain(prompt(2, seed=1), time_to_live_s=60)
    await alone.fail(more, QuotaExceededError, "token_ids")
    await alone.do(ops.retain(prompt(2), time_to_live_s=90))
    await alone.do(ops.release(prompt(2)))
    await alone.do(more)


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        (ops.retain([], time_to_live_s=1), "token_ids"),
        (ops.retain([1], time_to_live_s=0), "time_to_live"),
        (ops.retain([1], time_to_live_s=1, priority=0), "priority"),
        (ops.retain([1], time_to_live_s=1, priority=101), "priority"),
        (ops.release([]), "token_ids"),
    ],
    ids=["no tokens", "no time", "priority 0", "priority 101", "release nothing"],
)
async def test_a_retention_that_is_wrong_is_refused(caller, operation, field) -> None:
    await cache(caller, prompt(1))
    await caller.fail(operation, InvalidRequestError, field)


# Forgetting.


async def test_a_prefix_is_forgotten_with_all_that_follows_it(world, caller) -> None:
    await cache(caller, prompt(3))
    await cache(caller, [*prompt(1, extra=0), *prompt(2, seed=1)])
    await cache(caller, prompt(2, seed=2))
    result = await caller.do(ops.forget(prompt(1, extra=0)))
    assert result.results[0].forget.num_forgotten_blocks == 5
    assert await caller.num_cached(prompt(3)) == 0
    assert await caller.num_cached(prompt(2, seed=2)) == 16
    assert (await world.usage())["free"] == 14
    assert (await world.counters()).num_forgotten_blocks == 5


async def test_only_what_follows_the_tokens_is_forgotten(caller) -> None:
    await cache(caller, prompt(3))
    await caller.do(ops.forget(prompt(2, extra=0)))
    assert await caller.num_cached(prompt(3)) == 8


async def test_what_sequences_read_is_forgotten_only_by_force(world, caller) -> None:
    await caller.admit(1, prompt(2))
    await cache(caller, prompt(3))
    forget = ops.forget(prompt(1, extra=0))
    await caller.fail(forget, BlockInUseError, "token_ids")
    assert await caller.num_cached(prompt(3)) == 24
    forced = await caller.do(ops.forget(prompt(1, extra=0), force=True))
    assert forced.results[0].forget.num_forgotten_blocks == 3
    assert forced.results[0].forget.num_blocks_in_use == 2
    assert await caller.num_cached(prompt(3)) == 0
    assert (await world.usage())["held"] == 3
    await caller.grow(1, 77)
    await caller.do(ops.free([1]))
    assert await world.usage() == {"free": 16, "cached": 0, "held": 0, "retired": 0}


@pytest.mark.parametrize("scope", ops.Scope)
async def test_all_of_a_namespace_or_a_tenant_is_forgotten(world, caller, scope) -> None:
    adapter = await world.caller("lora-7")
    await cache(caller, prompt(2))
    await cache(adapter, prompt(3))
    forgotten = (await adapter.do(ops.forget(scope))).results[0].forget
    assert await adapter.num_cached(prompt(3)) == 0
    is_tenant = scope is ops.Scope.TENANT
    assert forgotten.num_forgotten_blocks == (5 if is_tenant else 3)
    assert await caller.num_cached(prompt(2)) == (0 if is_tenant else 16)


@pytest.mark.parametrize("scope", ops.Scope)
async def test_a_scope_in_use_is_left_whole(world, caller, scope) -> None:
    await caller.admit(1, prompt(2))
    await cache(caller, prompt(2, seed=1))
    await caller.fail(ops.forget(scope), BlockInUseError, f"{scope.value}_contents")


@pytest.mark.parametrize("tokens", [[], [1] * 7, [1] * 9], ids=["none", "part", "more"])
async def test_what_is_no_prefix_of_blocks_is_not_forgotten(caller, tokens) -> None:
    await cache(caller, prompt(1))
    await caller.fail(ops.forget(tokens), InvalidRequestError, "token_ids")


async def test_what_was_forgotten_while_it_is_computed_is_not_published(world, caller) -> None:
    result = await caller.session.step([ops.admit(1, prompt(2))])
    await caller.session.step([ops.forget(ops.Scope.NAMESPACE, force=True)])
    caller.session.add_receipt(world.shard.receipt(result.plan))
    await caller.session.submit_receipts()
    await caller.do(ops.free([1]))
    assert await (await world.caller()).num_cached(prompt(2)) in (0, 16)
    await caller.do(ops.forget(ops.Scope.NAMESPACE))
    assert (await world.usage())["free"] == 16


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
    assert await world.state() == before
    other.hang_up()


async def test_a_match_is_found_by_hashes_too_and_in_its_own_namespace(world, caller) -> None:
    await caller.admit(1, prompt(3))
    hashes = fixed((await caller.session.lookup_prefix(prompt(3))).hashes, 16)
    find = world.client.find_prefix
    for given, num_tokens in ((hashes, 24), (hashes[:2], 16), (hashes[1:], 0), ([b"?" * 16], 0)):
        (match,) = await find(hashes=given)
        assert match.num_device_tokens == num_tokens
    (match,) = await find(hashes=hashes, namespace="lora-7")
    assert match.num_device_tokens == 0, "the hashes are another namespace's"
    (match,) = await find(prompt(3), namespace="lora-7")
    assert match.num_device_tokens == 0


async def test_a_search_that_is_wrong_is_refused(world) -> None:
    for how, kind, field in (
        ({"token_ids": []}, InvalidRequestError, "token_ids"),
        ({"hashes": [b"?" * 15]}, InvalidRequestError, "hashes"),
        ({"token_ids": [1], "namespace": "n" * 129}, InvalidRequestError, "namespace"),
        ({"token_ids": [1], "pool_ids": ["nowhere"]}, PoolNotFoundError, "pool_ids[0]"),
    ):
        with pytest.raises(kind) as refused:
            await world.client.find_prefix(**how)
        assert refused.value.field == field
