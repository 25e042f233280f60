"""A pool of 16 device and 8 host blocks, of 8 tokens each, and one engine that uses it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.helpers.planning.operations_world import Caller, World


@pytest.fixture
async def world(start_world: Callable[..., Awaitable[World]]) -> World:
    return await start_world()


@pytest.fixture
async def caller(world: World) -> Caller:
    return await world.caller()
