"""Routers that follow pools of a control plane which is away."""

from __future__ import annotations

import asyncio
import gc

from kvplane.clients.control_client import ControlClient
from kvplane.integrations.router.feeds import PoolFeeds


async def test_a_router_that_is_stopped_while_it_waits_for_pools_says_nothing() -> None:
    """The loop cancels all tasks at once then, those that wait for each pool too."""
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(str(context)))
    async with ControlClient("127.0.0.1:1", timeout_s=1) as control:
        feeds = PoolFeeds(control, "", {}, set())
        before = asyncio.all_tasks()
        feeds.follow(["here", "there"])
        waiting = asyncio.create_task(feeds.wait(60))
        await asyncio.sleep(0.05)
        for task in asyncio.all_tasks() - before:
            task.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        del waiting
        gc.collect()
        await asyncio.sleep(0)
        await feeds.stop()
    assert said == []
