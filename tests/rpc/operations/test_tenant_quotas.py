"""What a tenant may have: blocks and sessions. It is refused with the reason before any work is
done, and a refusal changes nothing.
"""

from __future__ import annotations

import asyncio

import pytest

from kvplane import ops
from kvplane.errors import QuotaExceededError
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.planning.operations_world import BLOCK, prompt


async def test_a_tenant_has_only_so_many_sessions(start_world) -> None:
    world = await start_world(max_tenant_sessions=2)
    first, _ = [await world.caller() for _ in range(2)]
    before = await world.counters()
    with pytest.raises(QuotaExceededError):
        await world.caller()
    assert await world.counters() == before
    await first.session.close()
    world.callers.remove(first)
    async with asyncio.timeout(10):  # until the data plane has fenced it, it counts
        answer = await world.shard.receive()
        await world.shard.send(fence_done=rpb.FenceDone(session=answer.fence.session))
        while True:
            try:
                await world.caller()
                break
            except QuotaExceededError:
                await asyncio.sleep(0.01)


async def test_an_admission_in_line_is_judged_again_when_its_turn_comes(start_world) -> None:
    world = await start_world(num_device_blocks=10, max_tenant_blocks=8)
    one, other = [await world.caller() for _ in range(2)]
    await one.admit(1, prompt(6, extra=0))
    await one.admit(2, prompt(1, seed=1, extra=0))
    results = [await one.session.step([ops.free(1)])]  # the receipt is missing
    waits = ops.admit(5, prompt(5, seed=2, extra=0), wait=True)
    assert (await other.later(waits)).queue_position == 1
    grows = ops.append(2, [5] * 4 * BLOCK, 4 * BLOCK, first_positions=BLOCK)
    results.append(await one.session.step([grows]))
    for result in results:
        one.session.add_receipt(world.shard.receipt(result.plan))
    await one.session.submit_receipts()
    news = (await other.step()).news
    assert not news.granted
    assert dict(news.cut) == {5: pb.CUT_REASON_QUOTA}
    await one.do(ops.free(2))
    await other.admit(5, prompt(5, seed=2, extra=0))
