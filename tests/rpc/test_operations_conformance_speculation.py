"""Sequences that shrink, over a socket: lookahead slots, truncation, attention windows, and what
sequences share. A refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from kvplane import ops
from kvplane.errors import (
    InvalidRequestError,
    SequenceBusyError,
    SequenceNotFoundError,
)
from kvplane.layout import Layout
from kvplane.results import error_of
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns
from tests.helpers.planning.operations_world import (
    BLOCK,
    DEVICE,
    HOST,
    Caller,
    World,
    int32,
    plan_of,
    prompt,
)
from tests.helpers.planning.registration_messages import LAYOUT

StartWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def world(start_world: StartWorld) -> World:
    return await start_world()


@pytest.fixture
async def caller(world: World) -> Caller:
    return await world.caller()


# Lookahead slots.


async def test_lookahead_slots_have_blocks_before_they_are_computed(world, caller) -> None:
    await caller.admit(1, prompt(1, extra=0))
    ahead = ops.append(1, [8], 1, first_position=8, num_lookahead_slots=2 * BLOCK)
    result = await caller.do(ahead)
    assert int32(result.results[0].append.num_blocks) == [4]
    table = await caller.table(1)
    state = await caller.session.describe_sequence(1)
    assert (state.num_tokens, state.num_scheduled_tokens, state.num_blocks) == (9, 9, 4)
    for position in range(9, 25):
        step = await caller.grow(1, position)
        assert not plan_of(step).changes.kinds, "only a block that is missing costs anything"
    assert await caller.table(1) == table
    assert (await world.usage())["held"] == 4


async def test_many_sequences_look_ahead_in_one_column(caller) -> None:
    await caller.admit(1, prompt(1, extra=0))
    await caller.admit(2, prompt(1, seed=1, extra=0))
    result = await caller.do(ops.appends([1, 2], [8, 8], [1, 1], [1, 1], [5, 6], [0, 8]))
    assert int32(result.results[0].append.num_blocks) == [2, 3]


@pytest.mark.parametrize(
    ("slots", "field"),
    [([-1], "num_lookahead_slots[0]"), ([1, 1], "num_lookahead_slots")],
    ids=["negative", "length"],
)
async def test_lookahead_slots_that_are_wrong_are_refused(caller, slots, field) -> None:
    await caller.admit(1, prompt(1))
    append = ops.appends([1], [9], [1], [1], [5], slots)
    await caller.fail(append, InvalidRequestError, field)


async def test_lookahead_without_room_is_later(caller) -> None:
    await caller.admit(1, prompt(1, extra=0))
    await caller.admit(2, prompt(13, seed=1))
    append = ops.append(1, [5], 1, first_position=8, num_lookahead_slots=2 * BLOCK)
    shortage = await caller.later(append)
    assert (shortage.num_blocks_needed, shortage.num_blocks_available) == (3, 1)
    append.append.num_lookahead_slots = columns.pack(columns.INT32, [16 * BLOCK])
    await caller.never(append)


# Truncation.


async def test_rejected_tokens_are_given_back_with_the_blocks_they_empty(world, caller) -> None:
    await caller.admit(1, prompt(1))
    await caller.do(ops.append(1, [9, 10, 11], 10, first_position=9))
    assert len(await caller.table(1)) == 3
    result = await caller.do(ops.truncate(1, 10))
    assert int32(result.results[0].truncate.num_released_blocks) == [1]
    state = await caller.session.describe_sequence(1)
    assert (state.num_tokens, state.num_scheduled_tokens, state.num_written_tokens) == (10, 10, 10)
    assert (await world.usage())["held"] == state.num_blocks == 2
    kinds = plan_of(result).changes.kinds
    assert list(kinds) == [tpb.TABLE_CHANGE_KIND_TRUNCATE]
    assert (await caller.grow(1, 77)).results[0].append.num_blocks


async def test_what_no_plan_has_written_yet_is_truncated_too(world, caller) -> None:
    await caller.admit(1, prompt(1))
    step = await caller.session.step([ops.append(1, [9] * 9, 9, first_position=9)])
    truncated = await caller.session.step([ops.truncate(1, 9)])
    state = await caller.session.describe_sequence(1)
    assert (state.num_tokens, state.num_scheduled_tokens) == (9, 9)
    for result in (step, truncated):
        caller.session.add_receipt(world.shard.receipt(result.plan))
    await caller.session.submit_receipts()
    state = await caller.session.describe_sequence(1)
    assert (state.num_written_tokens, state.num_blocks) == (9, 2)
    assert await caller.num_cached([*prompt(1, extra=1), *[9] * 8]) == 8


async def test_a_published_block_is_left_to_its_readers(world, caller) -> None:
    await caller.admit(1, prompt(2))
    await caller.admit(2, prompt(2))
    await caller.do(ops.truncate(1, 10))
    before = await caller.table(2)
    await caller.grow(1, 77)
    assert (await caller.table(2), await caller.num_cached(prompt(2))) == (before, 16)
    assert (await caller.table(1))[1] != before[1]
    assert (await world.counters()).num_copies_on_write == 1


async def test_a_swapped_sequence_is_truncated_where_it_is(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    await caller.do(ops.swap_out([1]))
    await caller.do(ops.truncate(1, 8))
    assert [tier for tier, _, _ in await caller.table(1)] == [HOST]
    assert (await world.usage(HOST))["held"] == 1


async def test_a_fork_is_truncated_alone(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    await caller.do(ops.fork(1, 2))
    table = await caller.table(1)
    result = await caller.do(ops.truncate(2, 8))
    assert int32(result.results[0].truncate.num_released_blocks) == [0]
    assert (await caller.table(1), await caller.table(2)) == (table, table[:1])


async def test_to_truncate_to_what_is_there_changes_nothing(caller) -> None:
    await caller.admit(1, prompt(1))
    before = await caller.world.state()
    await caller.do(ops.truncate(1, 9))
    assert await caller.world.state() == before


@pytest.mark.parametrize(
    ("operation", "kind", "field"),
    [
        (ops.truncate(9, 1), SequenceNotFoundError, "sequence_ids[0]"),
        (ops.truncate(1, 0), InvalidRequestError, "num_tokens[0]"),
        (ops.truncate(1, 10), InvalidRequestError, "num_tokens[0]"),
        (ops.truncates([1], [5, 5]), InvalidRequestError, "num_tokens"),
    ],
    ids=["unknown", "none", "more", "length"],
)
async def test_a_truncation_that_is_wrong_is_refused(caller, operation, kind, field) -> None:
    await caller.admit(1, prompt(1))
    await caller.fail(operation, kind, field)


async def test_one_truncation_that_is_wrong_spoils_no_other(caller) -> None:
    await caller.admit(1, prompt(1))
    await caller.admit(2, prompt(1, seed=1))
    result = await caller.step(ops.truncates([1, 9, 2], [8, 8, 8]))
    (failure,) = result.results[0].failures
    assert (failure.item, type(error_of(failure))) == (1, SequenceNotFoundError)
    assert int32(result.results[0].truncate.num_released_blocks) == [1, 0, 1]


async def test_who_computes_in_a_step_is_not_truncated_in_it(caller) -> None:
    result = await caller.step(ops.admit(1, prompt(1)), ops.truncate(1, 4))
    assert type(error_of(result.results[1].failures[0])) is SequenceBusyError
    assert (await caller.session.describe_sequence(1)).num_tokens == 9


# Attention windows.


def windowed(num_tokens: int) -> Layout:
    group = replace(LAYOUT.groups[0], sliding_window_tokens=num_tokens)
    return replace(LAYOUT, groups=(group,))


async def test_blocks_behind_the_window_go_back(start_world: StartWorld) -> None:
    world = await start_world(windowed(2 * BLOCK), num_device_blocks=8)
    caller = await world.caller()
    await caller.admit(1, prompt(2))
    for position in range(17, 100):  # more tokens than the pool has slots for
        await caller.grow(1, position)
        assert (await world.usage())["held"] <= 4
    table = await caller.table(1)
    dropped = [index for _, index, _ in table if index == -1]
    assert len(dropped) >= (99 - 2 * BLOCK) // BLOCK - 1
    assert table[: len(dropped)] == ((DEVICE, -1, 0),) * len(dropped)
    state = await caller.session.describe_sequence(1)
    assert (state.num_tokens, state.num_blocks) == (100, 13)


async def test_the_data_plane_is_told_what_was_trimmed(start_world: StartWorld) -> None:
    caller = await (await start_world(windowed(BLOCK))).caller()
    await caller.admit(1, prompt(3))
    kinds = [tpb.TABLE_CHANGE_KIND_TRIM]
    seen: list[int] = []
    for position in range(25, 42):
        seen += plan_of(await caller.grow(1, position)).changes.kinds
    assert set(kinds) <= set(seen)


async def test_a_hit_needs_only_the_window(start_world: StartWorld) -> None:
    """The blocks before it may have been evicted."""
    world = await start_world(windowed(2 * BLOCK), num_device_blocks=8, num_host_blocks=0)
    caller = await world.caller()
    tokens = prompt(6)
    await caller.admit(1, tokens)
    for position in range(49, 58):
        await caller.grow(1, position)
        tokens.append(position)
    kept = [index for _, index, _ in await caller.table(1) if index != -1]
    other = await world.caller()
    await other.admit(1, prompt(8 - len(kept), seed=1, extra=0))
    await other.do(ops.free([1]))
    assert (await world.counters()).num_evictions > 0
    again = await caller.admit(2, tokens)
    assert again.num_cached_tokens == 56
    assert (await caller.table(2))[0] == (DEVICE, -1, 0)


async def test_what_lies_behind_the_window_cannot_be_truncated_to(start_world: StartWorld) -> None:
    caller = await (await start_world(windowed(BLOCK))).caller()
    await caller.admit(1, prompt(5))
    await caller.grow(1, 77)
    await caller.fail(ops.truncate(1, BLOCK), InvalidRequestError, "num_tokens[0]")


async def test_a_fork_of_a_windowed_sequence_shares_its_hole(start_world: StartWorld) -> None:
    world = await start_world(windowed(BLOCK))
    caller = await world.caller()
    await caller.admit(1, prompt(5))
    await caller.grow(1, 77)
    await caller.do(ops.fork(1, 2))
    assert await caller.table(1) == await caller.table(2)
    await caller.do(ops.free([1, 2]))
    assert (await world.usage())["held"] == 0
