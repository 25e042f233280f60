"""Sequences from their admission to their end, over a socket: what each operation does, when it is
refused, and that a refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from kvplane import ops
from kvplane.errors import (
    InvalidRequestError,
    PositionMismatchError,
    QuotaExceededError,
    SequenceBusyError,
    SequenceExistsError,
    SequenceNotFoundError,
    SequenceSwappedError,
)
from kvplane.results import error_of
from kvplane.v1 import control_pb2 as pb
from tests.helpers.planning.operations_world import (
    DEVICE,
    HOST,
    Caller,
    World,
    int32,
    plan_of,
    prompt,
)

StartWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def world(start_world: StartWorld) -> World:
    return await start_world()


@pytest.fixture
async def caller(world: World) -> Caller:
    return await world.caller()


# Admit.


async def test_admit_finds_the_longest_cached_prefix_of_full_blocks(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    hit = await caller.admit(2, prompt(2, extra=9))
    assert (hit.num_cached_tokens, hit.num_blocks, hit.num_scheduled_tokens) == (16, 4, 9)
    first, second = await caller.table(1), await caller.table(2)
    assert (first[:2] == second[:2], set(first[2:]) & set(second[2:])) == (True, set())
    assert (await world.usage())["held"] == 5


async def test_admit_computes_at_least_the_last_token(caller) -> None:
    await caller.admit(1, prompt(2, extra=0))
    whole = await caller.admit(2, prompt(2, extra=0))
    assert (whole.num_cached_tokens, whole.num_scheduled_tokens) == (15, 1)


async def test_admit_finds_what_was_freed(world, caller) -> None:
    await caller.admit(1, prompt(3))
    await caller.do(ops.free([1]))
    assert (await world.usage())["cached"] == 3
    assert (await caller.admit(2, prompt(3))).num_cached_tokens == 24


async def test_admit_can_pass_over_the_index_and_compute_later(caller) -> None:
    await caller.admit(1, prompt(2))
    fresh = await caller.admit(2, prompt(2), skip_prefix_lookup=True, num_compute_tokens=0)
    assert (fresh.num_cached_tokens, fresh.num_scheduled_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("operation", "kind", "field"),
    [
        (ops.admit(0, [1]), InvalidRequestError, "sequence_id"),
        (ops.admit(1, [1]), SequenceExistsError, "sequence_id"),
        (ops.admit(2, []), InvalidRequestError, "token_ids"),
        (ops.admit(2, b"\0" * 7), InvalidRequestError, "token_ids"),
        (ops.admit(2, [1], max_total_tokens=-1), InvalidRequestError, "max_total_tokens"),
        (ops.admit(2, [1], num_compute_tokens=-1), InvalidRequestError, "num_compute_tokens"),
    ],
    ids=["id", "live", "no tokens", "column", "total", "compute"],
)
async def test_an_admission_that_is_wrong_is_refused(caller, operation, kind, field) -> None:
    await caller.admit(1, prompt(1))
    await caller.fail(operation, kind, field)


async def test_an_admission_without_room_is_later_and_one_too_large_is_never(caller) -> None:
    await caller.admit(1, prompt(12))
    shortage = await caller.later(ops.admit(2, prompt(4, seed=1)))
    assert (shortage.tier, shortage.reason) == (DEVICE, pb.SHORTAGE_REASON_BLOCKS)
    assert (shortage.num_blocks_needed, shortage.num_blocks_available) == (5, 3)
    assert shortage.retry_delay.ToMilliseconds() > 0
    assert (await caller.never(ops.admit(2, prompt(16, seed=1)))).num_blocks_needed == 17
    assert (await caller.never(ops.admit(2, [1], max_total_tokens=129))).num_blocks_needed == 17


# Append.


async def test_append_takes_a_block_only_where_one_begins(world, caller) -> None:
    await caller.admit(1, prompt(1, extra=7))
    table = await caller.table(1)
    same = await caller.grow(1, 7)
    assert not plan_of(same).changes.kinds
    assert await caller.table(1) == table
    more = await caller.grow(1, 8)
    assert int32(more.results[0].append.num_blocks) == [3]
    assert (await caller.table(1))[:2] == table
    assert len(plan_of(more).changes.kinds) == 1


async def test_append_takes_a_prompt_in_chunks(world, caller) -> None:
    tokens = prompt(4, extra=0)
    await caller.admit(1, tokens, num_compute_tokens=10)
    before = (await world.usage())["held"]
    await caller.do(ops.append(1, (), 22, first_position=10))
    state = await caller.session.describe_sequence(1)
    assert (state.num_written_tokens, state.num_blocks) == (32, 4)
    assert before <= (await world.usage())["held"] == 4
    assert await caller.num_cached([*tokens, 1]) == 32


async def test_each_item_of_an_append_is_done_or_refused_by_itself(caller) -> None:
    await caller.admit(1, prompt(1))
    await caller.admit(2, prompt(1, seed=1))
    result = await caller.step(ops.appends([1, 9, 2], [9, 9, 8], [1, 1, 1], [1, 1, 1], [5, 5, 5]))
    (outcome,) = result.results
    assert int32(outcome.append.num_blocks) == [2, 0, 0]
    errors = [error_of(failure) for failure in outcome.failures]
    assert [failure.item for failure in outcome.failures] == [1, 2]
    assert [type(error) for error in errors] == [SequenceNotFoundError, PositionMismatchError]
    assert errors[1].field == "operations[0].append.first_positions[2]"
    assert (await caller.session.describe_sequence(2)).num_tokens == 9


@pytest.mark.parametrize(
    ("operation", "kind", "field"),
    [
        (ops.append(9, [5], 1, first_position=9), SequenceNotFoundError, "sequence_ids[0]"),
        (ops.append(1, [5], 1, first_position=8), PositionMismatchError, "first_positions[0]"),
        (ops.append(1, [5], -1, first_position=9), InvalidRequestError, "num_slots[0]"),
        (ops.append(1, [-5], 1, first_position=9), InvalidRequestError, "token_ids[0]"),
        (ops.appends([1], [9], [1], [2], [5]), InvalidRequestError, "token_ids"),
        (ops.appends([1], [9, 9], [1], [1], [5]), InvalidRequestError, "first_positions"),
        (ops.append(2, [5], 1, first_position=9), SequenceSwappedError, "sequence_ids[0]"),
    ],
    ids=["unknown", "position", "slots", "token", "tokens", "length", "swapped"],
)
async def test_an_append_that_is_wrong_is_refused(caller, operation, kind, field) -> None:
    await caller.admit(1, prompt(1))
    await caller.admit(2, prompt(1, seed=1))
    await caller.do(ops.swap_out([2]))
    await caller.fail(operation, kind, field)


async def test_an_append_without_room_is_later(caller) -> None:
    await caller.admit(1, prompt(7, extra=0))
    await caller.admit(2, prompt(9, seed=1, extra=0))
    shortage = await caller.later(ops.append(1, [5], 1, first_position=56))
    assert (shortage.num_blocks_needed, shortage.num_blocks_available) == (1, 0)


# Fork.


async def test_forks_share_all_blocks_and_copy_the_one_they_write(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    await caller.do(ops.forks([1, 1], [2, 3]))
    assert await caller.table(1) == await caller.table(2) == await caller.table(3)
    assert (await world.usage())["held"] == 3
    await caller.grow(2, 77)
    parent, child = await caller.table(1), await caller.table(2)
    assert (parent[:2], parent[2] == child[2]) == (child[:2], False)
    assert (await world.counters()).num_copies_on_write == 1
    assert (await world.usage())["held"] == 4


async def test_the_last_sharer_writes_in_place(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    await caller.do(ops.fork(1, 2))
    await caller.do(ops.free([1]))
    table = await caller.table(2)
    await caller.grow(2, 77)
    assert await caller.table(2) == table
    assert (await world.counters()).num_copies_on_write == 0


async def test_children_have_children_and_outlive_their_parents(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    for child in range(2, 12):
        await caller.do(ops.fork(child - 1, child))
    await caller.do(ops.free(range(1, 11)))
    assert (await world.usage())["held"] == len(await caller.table(11)) == 3
    assert (await caller.session.describe_sequence(11)).num_tokens == 20


async def test_a_swapped_sequence_is_forked_in_the_host_tier(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    await caller.do(ops.swap_out([1]))
    await caller.do(ops.fork(1, 2))
    assert await caller.table(1) == await caller.table(2)
    assert {tier for tier, _, _ in await caller.table(2)} == {HOST}
    await caller.do(ops.swap_in([1, 2]))
    assert await caller.table(1) == await caller.table(2)
    assert (await world.usage())["held"] == 3


@pytest.mark.parametrize(
    ("operation", "kind", "field"),
    [
        (ops.fork(9, 2), SequenceNotFoundError, "parent_sequence_ids[0]"),
        (ops.fork(1, 1), SequenceExistsError, "sequence_ids[0]"),
        (ops.fork(1, 0), InvalidRequestError, "sequence_ids[0]"),
        (ops.forks([1, 1], [2]), InvalidRequestError, "parent_sequence_ids"),
    ],
    ids=["parent", "live", "id", "length"],
)
async def test_a_fork_that_is_wrong_is_refused(caller, operation, kind, field) -> None:
    await caller.admit(1, prompt(1))
    await caller.fail(operation, kind, field)


async def test_forks_have_a_bound(start_world: StartWorld) -> None:
    caller = await (await start_world(max_table_entries=5)).caller()
    await caller.admit(1, prompt(1))
    await caller.do(ops.fork(1, 2))
    await caller.fail(ops.fork(1, 3), QuotaExceededError, "sequence_ids[0]")


async def test_who_computes_in_a_step_is_neither_forked_nor_freed_in_it(world, caller) -> None:
    for operation in (ops.fork(1, 2), ops.free([1]), ops.swap_out([1])):
        result = await caller.step(ops.admit(1, prompt(1)), operation)
        (failure,) = result.results[1].failures
        assert type(error_of(failure)) is SequenceBusyError
        assert (await world.client.describe_pool("pool")).num_sequences == 1
        await caller.do(ops.free([1]))


# Free.


async def test_many_are_freed_at_once_and_each_says_what_came_back(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    await caller.do(ops.fork(1, 2))
    await caller.admit(3, prompt(1, seed=1))
    result = await caller.do(ops.free([1, 2, 3]))
    assert int32(result.results[0].free.num_released_blocks) == [0, 3, 2]
    assert (await world.usage())["held"] == 0
    assert (await world.usage())["cached"] == 3


async def test_blocks_that_hold_no_prefix_are_allocated_first(caller) -> None:
    await caller.admit(1, prompt(6, extra=0))
    await caller.do(ops.free([1]))
    await caller.admit(2, prompt(9, seed=1))
    assert await caller.num_cached(prompt(6)) == 48


async def test_the_tail_of_a_prefix_is_evicted_before_its_head(caller) -> None:
    await caller.admit(1, prompt(6, extra=0))
    await caller.do(ops.free([1]))
    await caller.admit(2, prompt(12, seed=1))
    found = await caller.session.lookup_prefix(prompt(6))
    assert found.num_cached_tokens - found.num_host_tokens == 24, "the rest is in the host tier"


async def test_an_unknown_sequence_spoils_no_other_of_a_free(caller) -> None:
    await caller.admit(1, prompt(1))
    await caller.admit(2, prompt(1, seed=1))
    result = await caller.step(ops.free([1, 9, 2]))
    (failure,) = result.results[0].failures
    assert (failure.item, type(error_of(failure))) == (1, SequenceNotFoundError)
    assert int32(result.results[0].free.num_released_blocks) == [2, 0, 2]
    await caller.fail(ops.free([1]), SequenceNotFoundError, "sequence_ids[0]")


# Promotion to the prefix index.


async def test_a_block_is_found_once_it_is_full_and_written(world, caller) -> None:
    await caller.admit(1, prompt(1, extra=7))
    assert await caller.num_cached(prompt(2)) == 8
    result = await caller.session.step([ops.append(1, [15], 1, first_position=15)])
    assert await caller.num_cached(prompt(2)) == 8
    caller.session.add_receipt(world.shard.receipt(result.plan))
    await caller.session.submit_receipts()
    assert await caller.num_cached(prompt(2)) == 16


async def test_what_a_freed_sequence_wrote_is_found_when_its_receipt_comes(world, caller) -> None:
    result = await caller.session.step([ops.admit(1, prompt(2))])
    await caller.session.step([ops.free([1])])
    caller.session.add_receipt(world.shard.receipt(result.plan))
    await caller.session.submit_receipts()
    assert await caller.num_cached(prompt(2)) == 16


# Namespaces.


async def test_namespaces_share_no_prefix(world, caller) -> None:
    adapter = await world.caller("lora-7")
    await caller.admit(1, prompt(2))
    assert await adapter.num_cached(prompt(2)) == 0
    assert (await adapter.admit(1, prompt(2))).num_cached_tokens == 0
    assert await (await world.caller("lora-7")).num_cached(prompt(2)) == 16


# Swaps.


async def test_a_group_moves_between_the_tiers_and_stays_shared(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    await caller.do(ops.fork(1, 2))
    out = await caller.do(ops.swap_out([1, 2]))
    assert out.results[0].swap_out.num_blocks == 3
    assert await caller.table(1) == await caller.table(2)
    assert ((await world.usage())["held"], (await world.usage(HOST))["held"]) == (0, 3)
    back = await caller.do(ops.swap_in([2, 1]))
    assert back.results[0].swap_in.num_blocks <= 3
    assert await caller.table(1) == await caller.table(2)
    assert ((await world.usage())["held"], (await world.usage(HOST))["held"]) == (3, 0)


async def test_a_swap_without_room_is_later_or_never_and_moves_nobody(caller) -> None:
    await caller.admit(1, prompt(5, extra=0))
    await caller.admit(2, prompt(4, seed=1, extra=0))
    assert (await caller.never(ops.swap_out([1, 2]))).tier == HOST
    await caller.do(ops.swap_out([1]))
    shortage = await caller.later(ops.swap_out([2]))
    assert (shortage.tier, shortage.num_blocks_needed, shortage.num_blocks_available) == (
        HOST,
        4,
        3,
    )
    await caller.admit(3, prompt(12, seed=2, extra=0))
    assert (await caller.later(ops.swap_in([1]))).tier == DEVICE


@pytest.mark.parametrize(
    ("operation", "kind", "field"),
    [
        (ops.swap_out([1, 9]), SequenceNotFoundError, "sequence_ids[1]"),
        (ops.swap_out([]), InvalidRequestError, "sequence_ids"),
        (ops.swap_in([1]), SequenceSwappedError, "sequence_ids[0]"),
        (ops.swap_out([1, 2]), SequenceSwappedError, "sequence_ids[1]"),
    ],
    ids=["unknown", "none", "in", "out"],
)
async def test_a_swap_that_is_wrong_moves_nobody(caller, operation, kind, field) -> None:
    await caller.admit(1, prompt(1))
    await caller.admit(2, prompt(1, seed=1))
    await caller.do(ops.swap_out([2]))
    await caller.fail(operation, kind, field)
