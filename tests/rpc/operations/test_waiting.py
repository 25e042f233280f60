"""Admissions that wait in line, how their engines hear of grants, and what a tenant may have."""

from __future__ import annotations

import asyncio

import pytest

from kvplane import ops
from kvplane.errors import QuotaExceededError
from kvplane.runtime.link import ControlLink
from kvplane.sync.loop_thread import LoopThread
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from tests.helpers.planning.operations_world import POOL, prompt


class ThisLoop(LoopThread):
    """The test's own loop, called from other threads: gRPC then has one loop in this process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()


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


# What a tenant may have.


async def test_a_tenant_has_only_so_many_sessions(start_world) -> None:
    world = await start_world(max_tenant_sessions=2)
    first, _ = [await world.caller() for _ in range(2)]
    before = await world.counters()
    with pytest.raises(QuotaExceededError):
        await world.caller()
    assert await world.counters() == before
    await first.session.close()
    async with asyncio.timeout(10):  # until the data plane has fenced it, it counts
        answer = await world.shard.receive()
        await world.shard.send(fence_done=rpb.FenceDone(session=answer.fence.session))
        while True:
            try:
                await world.caller()
                break
            except QuotaExceededError:
                await asyncio.sleep(0.01)
