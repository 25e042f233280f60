"""Floors of tenants in the control plane: of new pools, when they change, and after a restart."""

from __future__ import annotations

from core_messages import LAYOUT
from core_model import Engine, World

from control_plane.planning.config import CoreConfig
from control_plane.planning.pools.floors import Floors
from kvplane import ops
from kvplane.v1 import control_pb2 as cpb

SIZE = LAYOUT.block_size_tokens
FLOOR = 4
SHARES = {"ann": FLOOR / 16}
PROMPT = range(FLOOR * SIZE + 1)


def compute(engine: Engine, tokens: range) -> None:
    engine.admit(1, tokens)
    engine.send(ops.free([1]))
    engine.settle()
    engine.world.pump()


def flood(world: World) -> Engine:
    bob = world.engine("bob")
    for number in range(1, 8):
        compute(bob, range(1000 * number, 1000 * number + (16 - FLOOR) * SIZE))
    return bob


def floors_of(world: World) -> dict[str, tuple[int, int]]:
    [pool] = world.core._pools.values()
    floors: Floors = pool.floors
    return floors.blocks(pool.groups)


def test_a_floor_holds_in_a_pool_that_came_later_and_after_a_restart() -> None:
    world = World(num_host=0, config=CoreConfig(watermark=0.0))
    compute(world.engine("ann"), PROMPT)
    world.restart_control_plane()
    world.core.set_cached_shares(SHARES)
    flood(world)
    assert world.engine("ann").lookup(PROMPT) == FLOOR * SIZE
    assert floors_of(world) == {"ann": (FLOOR, FLOOR)}
    world.core.check_integrity()


def test_a_floor_that_is_taken_away_protects_nothing() -> None:
    world = World(num_host=0, config=CoreConfig(watermark=0.0))
    world.core.set_cached_shares(SHARES)
    compute(world.engine("ann"), PROMPT)
    bob = flood(world)
    assert world.engine("ann").lookup(PROMPT) == FLOOR * SIZE
    [never] = bob.send(ops.admit(2, bytes(4 * (13 * SIZE)))).results
    assert never.failures[0].status == cpb.OPERATION_STATUS_NEVER
    assert never.failures[0].shortage.reason == cpb.SHORTAGE_REASON_FLOOR
    bob.settle()
    world.core.set_cached_shares({})
    compute(bob, range(9000, 9000 + 16 * SIZE))
    assert world.engine("ann").lookup(PROMPT) == 0
    assert floors_of(world) == {}
    world.core.check_integrity()
