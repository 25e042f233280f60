"""What an operation would be answered, and admissions that wait in line."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvplane import ops
from kvplane.errors import SequenceNotFoundError
from kvplane.results import error_of
from kvplane.runtime.link import ControlLink
from kvplane.sync.loop_thread import LoopThread
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.outcomes import outcomes
from tests.helpers.planning.operations_world import BLOCK, POOL, Caller, prompt


class ThisLoop(LoopThread):
    """The test's own loop, called from other threads: gRPC then has one loop in this process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()


# Checks.


async def answers(caller: Caller, *operations: pb.Operation) -> list[pb.OperationResult]:
    """What a check says; it must have changed nothing."""
    before = await caller.world.state()
    checked = outcomes(await caller.session.validate(operations))
    assert await caller.world.state() == before
    return checked


async def test_each_operation_is_checked_by_itself(caller) -> None:
    """The second would have no room after the first, and the third names what is not there yet."""
    one, other, append = await answers(
        caller,
        ops.admit(1, prompt(9)),
        ops.admit(2, prompt(9, seed=1)),
        ops.append(1, [5], 1, first_positions=73),
    )
    assert not one.failures
    assert not other.failures
    assert type(error_of(append.failures[0])) is SequenceNotFoundError


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
        return ops.free(one)
    if kind == 3:
        return ops.swap(one, "host")
    if kind == 4:
        return ops.swap(one, "device")
    if kind == 5:
        return ops.truncate(one, rng.randrange(1, 30))
    position = rng.randrange(1, 40)
    num = rng.randrange(1, 4)
    return ops.append(one, [7] * num, num, first_positions=position)


@pytest.mark.parametrize("seed", range(6))
async def test_the_check_and_the_step_never_disagree(start_world, seed: int) -> None:
    rng = random.Random(seed)
    caller = await (await start_world(num_device_blocks=8, num_host_blocks=3)).caller()
    for _ in range(60):
        operation = random_operation(rng)
        (checked,) = outcomes(await caller.session.validate([operation]))
        (done,) = outcomes(await caller.step(operation))
        for failure in (*checked.failures, *done.failures):
            failure.error.ClearField("request_id")  # each is of its own call
        assert list(checked.failures) == list(done.failures)
        if done.HasField("admit"):
            assert checked.admit == done.admit


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
    (failure,) = outcomes(asked)[0].failures
    assert failure.status == pb.ITEM_STATUS_LATER
    assert failure.shortage.queue_position == 1
    assert not failure.shortage.HasField("retry_delay")
    with pytest.raises(SequenceNotFoundError):
        (await caller.session.list_sequences([1]))[0]
    await other.do(ops.free(1))
    assert await granted(caller) == (1,)
    assert not (await caller.step()).news.granted, "it comes once"
    for sequence_id in (1, 2):
        state = (await caller.session.list_sequences([sequence_id]))[0]
        assert (state.num_tokens, state.num_scheduled_tokens) == (49, 0)
    await caller.do(ops.append(1, (), 49, first_positions=0))
    assert (await world.counters())["granted_admissions_total"] == 1


async def test_a_swap_in_that_waits_is_done_when_it_is_sent_again(caller) -> None:
    await caller.admit(1, prompt(4, extra=0))
    await caller.do(ops.swap(1, "host"))
    await caller.admit(2, prompt(13, seed=1, extra=0))
    assert (await caller.later(ops.swap(1, "device"))).queue_position == 1
    await caller.do(ops.truncate(2, 12 * BLOCK))
    await caller.do(ops.swap(1, "device"))


async def test_a_grant_is_pushed_between_steps(world, caller) -> None:
    other = await world.caller()
    await other.admit(1, prompt(12))
    await caller.step(ops.admit(1, prompt(6, seed=1), wait=True))
    assert not await caller.session.wait_for_news(0.05)
    await other.do(ops.free(1))
    assert await caller.session.wait_for_news(10)
    assert await caller.session.wait_for_news(10), "it is there until the next step"
    answered = (await caller.step()).news
    assert [grant.sequence_id for grant in answered.granted] == [1]
    assert not await caller.session.wait_for_news(0.05)
    await caller.do(ops.append(1, (), 49, first_positions=0))


async def test_the_engine_has_no_news_after_the_step_that_told_them(world) -> None:
    """Else it would ask again without end as soon as it waits for another admission."""
    other = await world.caller()
    await other.admit(1, prompt(12))
    loop = ThisLoop()
    link = await asyncio.to_thread(ControlLink, loop, world.server.address, POOL, timeout_s=10)
    await asyncio.to_thread(link.open, world.layout)
    await asyncio.to_thread(link.step, [ops.admit(1, prompt(6, seed=1), wait=True)])
    await other.do(ops.free(1))
    assert await asyncio.to_thread(link.has_news, 10)
    answered = (await asyncio.to_thread(link.step, [])).news
    assert [grant.sequence_id for grant in answered.granted] == [1]
    assert not await asyncio.to_thread(link.has_news, 0.05)
    await asyncio.to_thread(link.close)


async def test_a_wait_for_news_does_not_take_a_steps_answer(world, caller) -> None:
    await caller.admit(1, prompt(1))
    waits = asyncio.create_task(caller.session.wait_for_news(10))
    await asyncio.sleep(0.01)
    await caller.do(ops.append(1, [5], 1, first_positions=9))
    assert await waits, "something came"
    waits = asyncio.create_task(caller.session.wait_for_news(10))
    await asyncio.sleep(0.01)
    waits.cancel()
    await caller.do(ops.append(1, [5], 1, first_positions=10))


async def test_who_came_first_is_granted_first_and_a_free_withdraws(world, caller) -> None:
    holder, second, third, passer = [await world.caller() for _ in range(4)]
    await holder.admit(1, prompt(12))
    await caller.step(ops.admit(1, prompt(8, seed=1), wait=True))
    for place, waits in ((2, third), (3, second)):
        asked = await waits.step(ops.admit(1, prompt(1, seed=place), wait=True))
        shortage = outcomes(asked)[0].failures[0].shortage
        assert (shortage.queue_position, shortage.reason) == (place, pb.SHORTAGE_REASON_QUEUE)
    shortage = await passer.later(ops.admit(1, prompt(1, seed=4)))
    assert shortage.reason == pb.SHORTAGE_REASON_QUEUE
    await third.do(ops.free(1))
    await holder.do(ops.free(1))
    assert await granted(caller) == (1,)
    assert await granted(second) == (1,)
    assert not (await third.step()).news.granted
    with pytest.raises(SequenceNotFoundError):
        (await third.session.list_sequences([1]))[0]
