"""Sequences that are computed in chunks, look ahead, share blocks, shrink, move between the tiers
and leave blocks behind their attention window.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane import ops
from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout
from kvplane.results import total_of
from kvplane.wire.plane.v1 import plan_pb2
from tests.helpers.planning.operations_world import (
    BLOCK,
    DEVICE,
    HOST,
    plan_of,
    prompt,
)
from tests.helpers.planning.registration_messages import LAYOUT


async def test_a_prompt_takes_blocks_as_its_chunks_come(world, caller) -> None:
    tokens = prompt(4, extra=0)
    await caller.admit(1, tokens, num_compute_tokens=10)
    assert (await world.usage())["held"] == 2
    await (await world.caller()).admit(1, prompt(10, seed=1, extra=0))
    await caller.do(ops.append(1, (), 22, first_positions=10))
    state = (await caller.session.list_sequences([1]))[0]
    assert (state.num_written_tokens, state.num_blocks) == (32, 4)
    assert (await world.usage())["held"] == 14
    assert await caller.num_cached([*tokens, 1]) == 32


@pytest.mark.parametrize("how", ["admitted together", "forked"])
async def test_sequences_of_one_prompt_share_its_blocks_until_they_write(
    world, caller, how
) -> None:
    if how == "forked":
        await caller.admit(1, prompt(2, extra=4))
        await caller.do(ops.fork([1, 2], [2, 3]))
    else:
        await caller.admit(1, prompt(2, extra=4), fork_sequence_ids=[2, 3])
    table = await caller.table(3)
    assert await caller.table(1) == await caller.table(2) == table
    assert (await world.usage())["held"] == 3
    states = [(await caller.session.list_sequences([i]))[0] for i in (1, 2, 3)]
    assert [state.num_tokens for state in states] == [20, 20, 20]
    assert [state.admitted_by for state in states] == ([1, 3, 3] if how == "forked" else [1, 1, 1])
    await caller.grow(1, 71)
    await caller.grow(2, 72)
    first, second = await caller.table(1), await caller.table(2)
    assert first[:2] == second[:2] == table[:2]
    assert len({first[2], second[2], table[2]}) == 3
    await caller.do(ops.free([1, 2]))
    await caller.grow(3, 73)
    assert await caller.table(3) == table, "the last one writes in place"
    assert (await world.counters())["copies_on_write_total"] == 2
    assert (await world.usage())["held"] == 3


async def test_a_group_moves_between_the_tiers_and_stays_shared(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4))
    await caller.do(ops.fork(1, 2))
    out = await caller.do(ops.swap([1, 2], "host"))
    assert list(plan_of(out).transfers.destination_tiers) == [HOST] * 3
    await caller.do(ops.fork(1, 3))
    assert await caller.table(1) == await caller.table(2) == await caller.table(3)
    assert {tier for tier, _, _ in await caller.table(3)} == {HOST}
    assert ((await world.usage())["held"], (await world.usage(HOST))["held"]) == (0, 3)
    await caller.do(ops.truncate(3, 8))
    assert await caller.table(3) == (await caller.table(1))[:1]
    await caller.do(ops.swap([3, 2, 1], "device"))
    assert await caller.table(1) == await caller.table(2)
    assert await caller.table(3) == (await caller.table(1))[:1]
    assert ((await world.usage())["held"], (await world.usage(HOST))["held"]) == (3, 0)


async def test_rejected_tokens_are_given_back_with_the_blocks_they_empty(world, caller) -> None:
    await caller.admit(1, prompt(1))
    await caller.do(ops.append(1, [9, 10, 11], 10, first_positions=9))
    assert len(await caller.table(1)) == 3
    result = await caller.do(ops.truncate(1, 10))
    assert list(result.results[0].num_released_blocks) == [1]
    state = (await caller.session.list_sequences([1]))[0]
    assert (state.num_tokens, state.num_scheduled_tokens, state.num_written_tokens) == (10, 10, 10)
    assert (await world.usage())["held"] == state.num_blocks == 2
    kinds = plan_of(result).changes.kinds
    assert list(kinds) == [plan_pb2.TABLE_CHANGE_KIND_TRUNCATE]
    before = await world.state()
    await caller.do(ops.truncate(1, 10))
    assert await world.state() == before, "to truncate to what is there changes nothing"
    assert (await caller.grow(1, 77)).results[0].num_table_blocks


# Attention windows.


def windowed(num_tokens: int) -> Layout:
    group = replace(LAYOUT.groups[0], sliding_window_tokens=num_tokens)
    return replace(LAYOUT, groups=(group,))


async def test_blocks_behind_the_window_go_back(start_world) -> None:
    world = await start_world(windowed(2 * BLOCK), num_device_blocks=8)
    caller = await world.caller()
    await caller.admit(1, prompt(2))
    kinds = set()
    for position in range(17, 100):  # more tokens than the pool has slots for
        kinds |= {*plan_of(await caller.grow(1, position)).changes.kinds}
        assert (await world.usage())["held"] <= 4
    assert plan_pb2.TABLE_CHANGE_KIND_TRIM in kinds
    table = await caller.table(1)
    dropped = [index for _, index, _ in table if index == -1]
    assert len(dropped) >= (99 - 2 * BLOCK) // BLOCK - 1
    assert table[: len(dropped)] == ((DEVICE, -1, 0),) * len(dropped)
    state = (await caller.session.list_sequences([1]))[0]
    assert (state.num_tokens, state.num_blocks) == (100, 13)
    await caller.fail(ops.truncate(1, BLOCK), InvalidRequestError, "num_tokens[0]")
    await caller.do(ops.fork(1, 2))
    assert await caller.table(2) == table, "a fork shares the hole"
    await caller.do(ops.free([1, 2]))
    assert (await world.usage())["held"] == 0


async def test_a_hit_needs_only_the_window(start_world) -> None:
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
    await other.do(ops.free(1))
    assert total_of(await world.counters(), "evictions_total") > 0
    again = await caller.admit(2, tokens)
    assert again.num_cached_tokens == 56
    assert (await caller.table(2))[0] == (DEVICE, -1, 0)
