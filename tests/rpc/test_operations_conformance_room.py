"""Room, over a socket: what an operation would be answered, several sequences of one prompt, and
admissions that wait in line. A refusal changes nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from kvplane import ops
from kvplane.errors import InvalidRequestError, SequenceExistsError, SequenceNotFoundError
from kvplane.results import error_of, news_of
from kvplane.runtime.link import ControlLink
from kvplane.sync.loop_thread import LoopThread
from kvplane.v1 import control_pb2 as pb
from tests.helpers.planning.operations_world import (
    BLOCK,
    HOST,
    POOL,
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


class ThisLoop(LoopThread):
    """The test's own loop, called from other threads: gRPC then has one loop in this process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()


# Checks.


async def answers(caller: Caller, *operations: pb.Operation) -> list[pb.OperationResult]:
    """What a check says; it must have changed nothing."""
    before = await caller.world.state()
    checked = await caller.session.check(operations)
    assert await caller.world.state() == before
    return checked


def statuses(result: pb.OperationResult) -> list[pb.OperationStatus]:
    return [failure.status for failure in result.failures]


async def test_a_check_says_ok_later_or_never_and_takes_nothing(caller) -> None:
    await caller.admit(1, prompt(2, extra=0))
    await caller.admit(2, prompt(11, seed=1))
    fits, later, never, appended, swapped, unknown = await answers(
        caller,
        ops.admit(3, prompt(2)),
        ops.admit(3, prompt(4, seed=2)),
        ops.admit(3, prompt(16, seed=2)),
        ops.append(1, [5], 1, first_position=16),
        ops.swap_out([2]),
        ops.swap_in([9]),
    )
    assert not fits.failures
    assert (fits.admit.num_cached_tokens, fits.admit.num_blocks) == (16, 3)
    assert statuses(later) == [pb.OPERATION_STATUS_LATER]
    assert later.failures[0].shortage.reason == pb.SHORTAGE_REASON_BLOCKS
    assert statuses(never) == [pb.OPERATION_STATUS_NEVER]
    assert not appended.failures
    assert swapped.failures[0].shortage.tier == HOST
    assert type(error_of(unknown.failures[0])) is SequenceNotFoundError


async def test_each_operation_is_checked_by_itself(caller) -> None:
    """The second would have no room after the first, and the third names what is not there yet."""
    one, other, append = await answers(
        caller,
        ops.admit(1, prompt(9)),
        ops.admit(2, prompt(9, seed=1)),
        ops.append(1, [5], 1, first_position=73),
    )
    assert not one.failures
    assert not other.failures
    assert type(error_of(append.failures[0])) is SequenceNotFoundError


async def test_what_blocks_a_later_will_come_back_with_receipts(world, caller) -> None:
    admitted = await caller.session.step([ops.admit(1, prompt(14))])
    freed = await caller.session.step([ops.free([1])])
    other = await world.caller()
    (later,) = await answers(other, ops.admit(1, prompt(4, seed=1)))
    assert later.failures[0].shortage.num_blocks_pending == 15
    for result in (admitted, freed):
        caller.session.add_receipt(world.shard.receipt(result.plan))
    await caller.session.submit_receipts()
    (fits,) = await answers(other, ops.admit(1, prompt(4, seed=1)))
    assert not fits.failures


def random_operation(rng: random.Random) -> pb.Operation:
    one, two = rng.sample(range(1, 7), 2)
    kind = rng.randrange(8)
    if kind == 0:
        tokens = prompt(rng.randrange(5), seed=rng.randrange(3), extra=rng.randrange(1, BLOCK))
        forks = [two] if rng.random() < 0.3 else []
        return ops.admit(one, tokens, fork_sequence_ids=forks)
    if kind == 1:
        return ops.fork(one, two)
    if kind == 2:
        return ops.free([one])
    if kind == 3:
        return ops.swap_out([one])
    if kind == 4:
        return ops.swap_in([one])
    if kind == 5:
        return ops.truncate(one, rng.randrange(1, 30))
    position = rng.randrange(1, 40)
    num = rng.randrange(1, 4)
    return ops.append(one, [7] * num, num, first_position=position)


@pytest.mark.parametrize("seed", range(6))
async def test_the_check_and_the_step_never_disagree(start_world: StartWorld, seed: int) -> None:
    rng = random.Random(seed)
    caller = await (await start_world(num_device_blocks=8, num_host_blocks=3)).caller()
    for _ in range(60):
        operation = random_operation(rng)
        (checked,) = await caller.session.check([operation])
        (done,) = (await caller.step(operation)).results
        for failure in (*checked.failures, *done.failures):
            failure.error.ClearField("request_id")  # each is of its own call
        assert list(checked.failures) == list(done.failures)
        if done.HasField("admit"):
            assert checked.admit == done.admit


async def test_a_swap_in_leaves_the_headroom_that_admissions_leave(
    start_world: StartWorld,
) -> None:
    caller = await (await start_world(watermark=0.25)).caller()
    await caller.admit(1, prompt(4, extra=0))
    await caller.do(ops.swap_out([1]))
    await caller.admit(2, prompt(9, seed=1, extra=0))
    swap_in = ops.swap_in([1])
    assert (await caller.later(swap_in)).reason == pb.SHORTAGE_REASON_HEADROOM
    (checked,) = await answers(caller, swap_in)
    assert statuses(checked) == [pb.OPERATION_STATUS_LATER]
    await caller.do(ops.truncate(2, 8 * BLOCK))
    await caller.do(swap_in)


async def test_a_prompt_takes_blocks_as_its_chunks_come(world, caller) -> None:
    await caller.admit(1, prompt(12, extra=0), num_compute_tokens=10)
    assert (await world.usage())["held"] == 2
    await (await world.caller()).admit(1, prompt(10, seed=1, extra=0))
    await caller.do(ops.append(1, (), 22, first_position=10))
    assert (await caller.later(ops.append(1, (), 64, first_position=32))).num_blocks_needed == 8


# Several sequences of one prompt.


async def test_sequences_of_one_prompt_start_together_on_the_same_blocks(world, caller) -> None:
    result = await caller.do(ops.admit(1, prompt(2, extra=4), fork_sequence_ids=[2, 3]))
    assert result.results[0].admit.num_blocks == 3
    assert await caller.table(1) == await caller.table(2) == await caller.table(3)
    assert (await world.usage())["held"] == 3
    states = [await caller.session.describe_sequence(i) for i in (1, 2, 3)]
    assert [state.num_tokens for state in states] == [20, 20, 20]
    assert [state.admitted_by for state in states] == [1, 1, 1]
    spans = plan_of(result).spans
    assert (len(spans.sequence_ids), int32(spans.num_tokens)) == (8, [20])


async def test_sequences_of_one_prompt_part_where_they_write(world, caller) -> None:
    await caller.admit(1, prompt(2, extra=4), fork_sequence_ids=[2, 3])
    await caller.grow(1, 71)
    await caller.grow(2, 72)
    table = await caller.table(3)
    await caller.grow(3, 73)
    assert await caller.table(3) == table, "the last one writes in place"
    assert (await world.counters()).num_copies_on_write == 2
    assert (await world.usage())["held"] == 5


@pytest.mark.parametrize(
    ("forks", "kind", "field"),
    [
        ([3, 0], InvalidRequestError, "fork_sequence_ids[1]"),
        ([3, 1], SequenceExistsError, "fork_sequence_ids[1]"),
        ([3, 2], SequenceExistsError, "fork_sequence_ids[1]"),
        ([3, 3], SequenceExistsError, "fork_sequence_ids[1]"),
        (b"\0" * 7, InvalidRequestError, "fork_sequence_ids"),
    ],
    ids=["id", "live", "the first", "twice", "column"],
)
async def test_none_starts_where_one_cannot(caller, forks, kind, field) -> None:
    await caller.admit(1, prompt(1))
    await caller.fail(ops.admit(2, prompt(2), fork_sequence_ids=forks), kind, field)


async def test_all_sequences_of_a_prompt_wait_for_room_together(caller) -> None:
    await caller.admit(1, prompt(13))
    shortage = await caller.later(ops.admit(2, prompt(2, seed=1), fork_sequence_ids=[3, 4]))
    assert (shortage.num_blocks_needed, shortage.num_blocks_available) == (3, 2)


async def test_the_element_at_fault_is_named(caller) -> None:
    await caller.fail(ops.admit(1, [1, 2, -3]), InvalidRequestError, "token_ids[2]")
    await caller.admit(1, prompt(1))
    await caller.fail(ops.swap_out([1, 1]), InvalidRequestError, "sequence_ids[1]")


async def test_nothing_is_reserved_by_a_declared_length_that_fits(world, caller) -> None:
    await caller.admit(1, prompt(1), max_total_tokens=16 * BLOCK)
    assert (await (await world.caller()).admit(1, prompt(13, seed=1, extra=0))).num_blocks == 13


# Waiting in line.


async def granted(caller: Caller) -> tuple[int, ...]:
    """The sequences that the next steps' news grant; waits for them."""
    async with asyncio.timeout(10):
        while True:
            news = (await caller.step()).news
            if news.granted:
                return tuple(grant.sequence_id for grant in news.granted)
            await asyncio.sleep(0.01)


async def test_an_admission_that_waits_is_granted_when_there_is_room(world, caller) -> None:
    other = await world.caller()
    await other.admit(1, prompt(12))
    asked = await caller.step(ops.admit(1, prompt(6, seed=1), fork_sequence_ids=[2], wait=True))
    (failure,) = asked.results[0].failures
    assert failure.status == pb.OPERATION_STATUS_LATER
    assert failure.shortage.place_in_line == 1
    assert not failure.shortage.HasField("retry_delay")
    with pytest.raises(SequenceNotFoundError):
        await caller.session.describe_sequence(1)
    await other.do(ops.free([1]))
    assert await granted(caller) == (1,)
    for sequence_id in (1, 2):
        state = await caller.session.describe_sequence(sequence_id)
        assert (state.num_tokens, state.num_scheduled_tokens) == (49, 0)
    await caller.do(ops.append(1, (), 49, first_position=0))
    assert (await world.counters()).num_granted_admissions == 1


async def test_a_grant_is_pushed_between_steps(world, caller) -> None:
    other = await world.caller()
    await other.admit(1, prompt(12))
    await caller.step(ops.admit(1, prompt(6, seed=1), wait=True))
    assert not await caller.session.wait_for_news(0.05)
    await other.do(ops.free([1]))
    assert await caller.session.wait_for_news(10)
    assert await caller.session.wait_for_news(10), "it is there until the next step"
    answered = (await caller.step()).news
    assert [grant.sequence_id for grant in answered.granted] == [1]
    assert [news_of(notice) for notice in caller.session.take_notices()] == [answered]
    assert not await caller.session.wait_for_news(0.05)
    await caller.do(ops.append(1, (), 49, first_position=0))


async def test_the_engine_has_no_news_after_the_step_that_told_them(world) -> None:
    """Else it would ask again without end as soon as it waits for another admission."""
    other = await world.caller()
    await other.admit(1, prompt(12))
    loop = ThisLoop()
    link = await asyncio.to_thread(ControlLink, loop, world.server.address, POOL, timeout_s=10)
    await asyncio.to_thread(link.open, world.layout)
    await asyncio.to_thread(link.step, [ops.admit(1, prompt(6, seed=1), wait=True)])
    await other.do(ops.free([1]))
    assert await asyncio.to_thread(link.has_news, 10)
    answered = (await asyncio.to_thread(link.step, [])).news
    assert [grant.sequence_id for grant in answered.granted] == [1]
    assert not await asyncio.to_thread(link.has_news, 0.05)
    await asyncio.to_thread(link.close)


async def test_a_wait_for_news_does_not_take_a_steps_answer(world, caller) -> None:
    await caller.admit(1, prompt(1))
    waits = asyncio.create_task(caller.session.wait_for_news(10))
    await asyncio.sleep(0.01)
    await caller.do(ops.append(1, [5], 1, first_position=9))
    assert await waits, "something came"
    waits = asyncio.create_task(caller.session.wait_for_news(10))
    await asyncio.sleep(0.01)
    waits.cancel()
    await caller.do(ops.append(1, [5], 1, first_position=10))


async def test_a_grant_comes_once_and_again_where_its_number_is_repeated(world, caller) -> None:
    other = await world.caller()
    await other.admit(1, prompt(12))
    await caller.step(ops.admit(1, prompt(6, seed=1), wait=True))
    await other.do(ops.free([1]))
    assert await granted(caller) == (1,)
    number = caller.session.last_number - 1  # the receipt of its plan took the next
    step = pb.StepRequest(session=caller.session.ref, number=number)
    again = await world.stub.RunStep(pb.RunStepRequest(step=step))
    assert [grant.sequence_id for grant in again.result.news.granted] == [1]
    assert not (await caller.step()).news.granted


async def test_who_came_first_is_granted_first_and_nobody_passes_the_head(world, caller) -> None:
    holder, second = await world.caller(), await world.caller()
    await holder.admit(1, prompt(12))
    await caller.step(ops.admit(1, prompt(8, seed=1), wait=True))
    asked = await second.step(ops.admit(1, prompt(1, seed=2), wait=True))
    shortage = asked.results[0].failures[0].shortage
    assert (shortage.place_in_line, shortage.reason) == (2, pb.SHORTAGE_REASON_LINE)
    passer = await world.caller()
    shortage = await passer.later(ops.admit(1, prompt(1, seed=3)))
    assert shortage.reason == pb.SHORTAGE_REASON_LINE
    await holder.do(ops.free([1]))
    assert await granted(caller) == (1,)
    assert await granted(second) == (1,)


async def test_a_free_withdraws_an_admission_that_waits(world, caller) -> None:
    holder, second = await world.caller(), await world.caller()
    await holder.admit(1, prompt(12))
    await caller.step(ops.admit(1, prompt(8, seed=1), wait=True))
    await second.step(ops.admit(1, prompt(2, seed=2), wait=True))
    await caller.do(ops.free([1]))
    assert await granted(second) == (1,)
    await holder.do(ops.free([1]))
    assert not (await caller.step()).news.granted
    with pytest.raises(SequenceNotFoundError):
        await caller.session.describe_sequence(1)


async def test_an_admission_that_never_fits_does_not_wait(caller) -> None:
    await caller.never(ops.admit(1, prompt(16), wait=True))
    await caller.admit(2, prompt(1))
