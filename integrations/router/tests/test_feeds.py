"""Tests which pools a router follows."""

from __future__ import annotations

import asyncio

from kvplane.clients.control_client import ControlClient
from kvplane.integrations.router.feeds import PoolFeeds
from kvplane.integrations.router.pool_index import PoolIndex


def test_it_follows_the_pools_that_were_named_last() -> None:
    async def check() -> None:
        indexes, lost = {"left": PoolIndex(4)}, {"left", "stays"}
        async with ControlClient("127.0.0.1:1") as nobody:
            feeds = PoolFeeds(nobody, "", indexes, lost)
            feeds.follow(["left", "stays"])
            feeds.follow(["stays", "new", "new"])
            assert feeds.caught_up == {"stays": False, "new": False}
            assert (indexes, lost) == ({}, {"stays"})
            await feeds.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(check())
