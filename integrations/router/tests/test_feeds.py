"""Tests which pools a router follows."""

from __future__ import annotations

import asyncio

from kvplane.clients.control_client import ControlClient
from kvplane.integrations.router.feeds import PoolFeeds


async def test_each_pool_has_one_feed_until_all_are_stopped() -> None:
    async with ControlClient("127.0.0.1:1") as nobody:
        feeds = PoolFeeds(nobody, "", {}, set())
        feeds.follow(["one", "two", "two"])
        assert feeds.caught_up == {"one": False, "two": False}
        await feeds.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}
