"""What an operation would be answered, and admissions that wait in line."""

from __future__ import annotations

import asyncio

from kvplane import ops
from kvplane.runtime.link import ControlLink
from kvplane.sync.loop_thread import LoopThread
from tests.helpers.planning.operations_world import POOL, prompt


class ThisLoop(LoopThread):
    """The test's own loop, called from other threads: gRPC then has one loop in this process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()


# Checks.


# Waiting in line.


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
