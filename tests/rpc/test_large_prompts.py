"""A long prompt fits the default limit; one that no message holds is refused with the reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from kvplane import ops
from kvplane.errors import QuotaExceededError
from tests.helpers.planning.operations_world import BLOCK, World, prompt

StartWorld = Callable[..., Awaitable[World]]

NUM_TOKENS = 10_000_000


async def numbers(world: World) -> list[int]:
    """The last number of each session that the control plane has answered."""
    return [each.last_number for each in await world.client.list_sessions("pool")]


async def test_a_message_over_the_limit_uses_no_number_and_changes_nothing(
    start_world: StartWorld,
) -> None:
    """Of the default limit: gRPC refuses it unread, so no field of it is named."""
    world = await start_world()
    caller = await world.caller()
    await caller.admit(1, prompt(1))
    assert await caller.num_cached(range(2_000_000)) == BLOCK  # 8 MB; gRPC's own default is 4 MiB
    before, sessions = world.state(), await numbers(world)
    with pytest.raises(
        QuotaExceededError,
        match=r"larger than max .*: send it in parts, or raise .* --max-message-bytes",
    ):
        await caller.session.step([ops.admit(2, bytes(4 * NUM_TOKENS))])
    assert await numbers(world) == sessions
    assert world.state() == before
    await caller.grow(1, 5)
