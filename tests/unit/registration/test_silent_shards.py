"""A pool of two shards of which one says that plans ran and the other does not."""

from __future__ import annotations

import pytest

from control_plane import limits
from control_plane.sessions.silent_shards import num_missing_receipts
from kvplane import ops
from kvplane.errors import MissingReceiptError, PoolNotReadyError
from tests.helpers.core.core_model import Engine, World

TIMEOUT_S = limits.RECEIPT_TIMEOUT_S


def world_of(num_shards: int = 2) -> World:
    return World(num_shards, num_device=32, lease_s=10_000.0)


def step(engine: Engine, *shards: int) -> None:
    """A step of a new sequence, with the receipts of these shards for their next plans."""
    for shard in shards:
        engine.run_next(shard)
    receipts, engine.receipts = engine.receipts, []
    engine.step(ops.admit(engine.number + 1, [1, 2]), receipts=receipts)


def num_ended(world: World) -> int:
    """Blocks that sessions held that were ended for missing receipts."""
    return world.observed().statistics.reclaimed_blocks["receipt"]


def test_a_plan_has_run_when_all_shards_have_receipted_it() -> None:
    world = world_of()
    engine = world.engine()
    for shards, num_missing, num_in_flight in (
        ((), [0, 0], 1),
        ((0,), [0, 1], 2),
        ((0,), [0, 2], 3),
        ((1, 1), [0, 0], 2),
    ):
        step(engine, *shards)
        seen = world.observed()
        assert seen.num_missing_receipts == num_missing
        assert seen.num_plans_in_flight == num_in_flight


def test_a_missing_receipt_ends_its_session_alone() -> None:
    world = world_of()
    engine, other = world.engine(), world.engine()
    step(engine)
    step(other)
    step(engine, 0)
    world.pass_time(TIMEOUT_S - 1)
    assert num_ended(world) == 0
    world.pass_time(2)
    assert num_ended(world) == 2
    with pytest.raises(MissingReceiptError):
        step(engine)
    world.pump()
    world.pass_time(3 * TIMEOUT_S)  # the other's plan has no receipt at all: nobody is late
    step(other)
    assert world.pool.ready
    world.core.check_integrity()


def test_a_plan_that_no_shard_has_receipted_is_only_long() -> None:
    world = world_of()
    engine = world.engine()
    step(engine)
    world.pass_time(3 * TIMEOUT_S)
    step(engine, 0, 1)
    world.pass_time(3 * TIMEOUT_S)
    step(engine)


def test_a_shard_that_does_not_fence_such_a_session_either_ends_all() -> None:
    world = world_of()
    engine, other = world.engine(), world.engine()
    step(engine)
    step(other)
    step(engine, 0)
    world.pass_time(TIMEOUT_S + 1)
    world.shards[0].pump()
    world.pass_time(TIMEOUT_S - 2)
    other.renew()
    assert world.pool.ready
    world.pass_time(3)
    with pytest.raises(MissingReceiptError):
        step(other)
    assert not world.pool.ready
    world.shards[0].pump()
    with pytest.raises(PoolNotReadyError, match="shards 1 have not stopped"):
        world.engine()
    world.shards[1].restart()
    world.shards[1].come()
    world.shards[0].pump()
    world.engine()
    world.core.check_integrity()


def test_a_shard_that_comes_to_after_all_is_used_again() -> None:
    world = world_of()
    engine = world.engine()
    step(engine)
    step(engine, 0)
    world.pass_time(3 * TIMEOUT_S)
    assert not world.pool.ready
    world.pump()
    world.engine()


def test_a_session_that_closes_slowly_harms_nobody() -> None:
    """Only a fence after a missing receipt counts: a shard may be away while sessions end."""
    world = world_of()
    engine, other = world.engine(), world.engine()
    engine.close()
    world.pass_time(10 * TIMEOUT_S)
    step(other)


def test_a_pool_of_one_shard_lacks_no_receipts() -> None:
    world = world_of(1)
    engine = world.engine()
    step(engine)
    world.pass_time(10 * TIMEOUT_S)
    step(engine)
    assert world.observed().num_missing_receipts == [0]
    assert num_missing_receipts(3, []) == [0, 0, 0]
