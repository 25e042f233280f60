"""Prefixes that are forgotten, by force or not, and retained without a session."""

from __future__ import annotations

from kvplane import ops
from kvplane.errors import BlockInUseError
from kvplane.prefixes import DEFAULT_PRIORITY, ForgetScope
from kvplane.results import ForgetResult
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from tests.helpers.planning.operations_world import prompt


async def test_what_sequences_read_is_forgotten_only_by_force(world, caller) -> None:
    await caller.admit(1, prompt(2))
    await caller.cache(prompt(3))
    block = prompt(1, extra=0)
    await caller.denied(caller.forget(block), BlockInUseError, "token_ids")
    for scope in ForgetScope:
        await caller.denied(caller.forget(scope), BlockInUseError, "scope")
    assert await caller.num_cached(prompt(3)) == 24
    assert await caller.forget(block, force=True) == ForgetResult(3, 2)
    assert await caller.num_cached(prompt(3)) == 0
    assert (await world.usage())["held"] == 3
    await caller.grow(1, 77)
    await caller.do(ops.free(1))
    assert await world.usage() == {"free": 16, "cached": 0, "held": 0, "retired": 0}


async def test_prefixes_are_kept_and_forgotten_after_their_sessions_have_ended(
    world, caller
) -> None:
    await caller.cache(prompt(2))
    await caller.session.close()
    await world.shard.send(fence_done=rpb.FenceDone(session=caller.session._ref))
    assert await caller.retain(prompt(2), time_to_live_s=60) == 2
    assert [block.priority for block in await caller.blocks(prompt(2))] == [DEFAULT_PRIORITY] * 2
    assert await caller.forget(ForgetScope.TENANT) == ForgetResult(2, 0)
    assert await caller.blocks(prompt(2)) == ()
    world.server.core.check_integrity()
