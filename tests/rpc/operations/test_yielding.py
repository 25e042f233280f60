"""Sessions that are asked for blocks: what they are told, what they lose when they
do not yield, and that the prefixes which they wrote are found all the same.
"""

from __future__ import annotations

import pytest

from kvplane import ops
from kvplane.errors import SequenceNotFoundError, SequenceRevokedError
from kvplane.results import SessionNews, total_of
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.planning.operations_world import BLOCK, Caller, StoppedClock, World, prompt

PATIENCE_S = 30.0
GRACE_S = 1.0
"""How long others wait before a session is asked, and then how long it has."""
PAST_GRACE_S = 1.25


@pytest.fixture
async def world(start_world) -> World:
    return await start_world(num_device_blocks=8, num_host_blocks=0)


@pytest.fixture
async def senior(world: World, clock: StoppedClock) -> Caller:
    """The session that was opened first."""
    return await world.caller()


@pytest.fixture
async def junior(world: World, senior: Caller) -> Caller:
    return await world.caller()


async def told(caller: Caller) -> SessionNews:
    """What is pushed to the session; its next step's answer has the same."""
    assert await caller.session.wait_for_news(PATIENCE_S)
    return (await caller.step(ops.free([]))).news  # with a plan, if tables have changed


async def hears_nothing(caller: Caller) -> bool:
    return not await caller.session.wait_for_news(0.5)  # two times of what is due


async def block_growth(senior: Caller, junior: Caller) -> pb.Operation:
    """The junior session holds half of the pool and the senior one the other half. Returns what the
    latter asks for in vain.
    """
    await senior.admit(1, prompt(4, extra=0))
    await junior.admit(1, prompt(3, seed=1), fork_sequence_ids=[2])
    growth = ops.append(1, [5], 1, first_positions=4 * BLOCK)
    assert (await senior.later(growth)).reason == pb.SHORTAGE_REASON_BLOCKS
    return growth


async def test_growth_that_is_blocked_cuts_who_is_asked_and_does_not_yield(
    world, clock, senior, junior
) -> None:
    growth = await block_growth(senior, junior)
    assert await hears_nothing(junior)
    clock.advance(PAST_GRACE_S)
    asked = await told(junior)
    assert asked.sequences_asked == (1, 2)
    assert asked.num_blocks_asked >= 4, "what both refer to may count for each"
    assert asked.deadline_s == GRACE_S
    assert not asked.cut
    assert await hears_nothing(junior)
    table = await junior.table(1)
    assert len(table) == 4, "it has until the deadline"
    clock.advance(PAST_GRACE_S)
    assert dict((await told(junior)).cut) == dict.fromkeys((1, 2), pb.CUT_REASON_GROWTH)
    await senior.do(growth)
    assert (await senior.table(1))[-1][:2] == table[-1][:2], "the block that held no prefix"
    assert total_of(await world.counters(), "cut_sequences_total") == 2
    third = await world.caller()
    assert await third.num_cached(prompt(3, seed=1)) == 3 * BLOCK
    await senior.do(ops.free(1))
    assert (await third.admit(1, prompt(3, seed=1))).num_cached_tokens == 3 * BLOCK


async def test_a_sequence_that_was_cut_is_answered_as_revoked_until_it_is_freed(
    clock, senior, junior
) -> None:
    growth = await block_growth(senior, junior)
    clock.advance(PAST_GRACE_S)
    await told(junior)
    clock.advance(PAST_GRACE_S)
    await told(junior)
    await senior.do(growth)
    for operation, field in (
        (ops.append(1, [5], 1, first_positions=3 * BLOCK + 1), "sequence_ids[0]"),
        (ops.fork(1, 3), "parent_sequence_ids[0]"),
        (ops.truncate(1, BLOCK), "sequence_ids[0]"),
        (ops.swap(1, "host"), "sequence_ids[0]"),
    ):
        (failure,) = await junior.refuse(operation)
        assert failure.error.reason == "SEQUENCE_REVOKED"
        await junior.fail(operation, SequenceRevokedError, field)
    for ask in (lambda i: junior.session.list_sequences([i]), junior.session.get_block_table):
        with pytest.raises(SequenceNotFoundError):
            await ask(1)
    await junior.do(ops.free(1))
    await junior.fail(ops.truncate(1, BLOCK), SequenceNotFoundError, "sequence_ids[0]")
    await senior.do(ops.free(1))
    assert (await junior.admit(2, prompt(3, seed=1))).num_cached_tokens == 3 * BLOCK
    await junior.grow(2, 7)
