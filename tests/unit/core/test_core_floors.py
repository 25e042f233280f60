"""Floors of tenants in the control plane: of new pools, when they change, and after a restart."""

from __future__ import annotations

from core_messages import LAYOUT
from core_model import Engine, World

from control_plane.planning.config import CoreConfig
from control_plane.planning.pools.floors import Floors
from kvplane import ops
from kvplane.v1 import control_pb2 as cpb
from kvplane.wire import columns

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


def wait_for(engine: Engine, num_blocks: int) -> None:
    tokens = columns.pack(columns.INT32, range(5000, 5000 + num_blocks * SIZE))
    [result] = engine.send(ops.admit(1, tokens, wait=True)).results
    assert result.failures[0].shortage.place_in_line == 1


def pass_time(world: World, engines: list[Engine], num_s: int = 400) -> None:
    for _ in range(num_s):
        world.clock.now += 1.0
        for engine in engines:
            if engine.id in world.core._sessions:
                engine.renew()
        world.tick()


def test_who_waits_for_more_than_a_raised_floor_leaves_keeps_nobody_waiting() -> None:
    world = World(num_host=0, config=CoreConfig(watermark=0.0))
    bob, carol, dave = (world.engine(name) for name in ("bob", "carol", "dave"))
    bob.admit(1, range(8 * SIZE))
    wait_for(carol, 14)
    world.core.set_cached_shares({"ann": 0.5})
    pass_time(world, [bob, carol, dave], num_s=5)
    bob.send(ops.free([1]))
    bob.settle()
    world.pump()
    dave.admit(1, range(SIZE))
    world.core.check_integrity()


def test_growth_that_a_raised_floor_rules_out_keeps_nobody_waiting() -> None:
    world = World(num_host=0, config=CoreConfig(watermark=0.0))
    bob, eve, dave = (world.engine(name) for name in ("bob", "eve", "dave"))
    eve.admit(1, range(1000, 1000 + 7 * SIZE))
    bob.admit(1, range(9 * SIZE))
    tokens = columns.pack(columns.INT32, range(2 * SIZE))
    at = bob.sequences[1].num_scheduled
    [grown] = bob.send(ops.append(1, tokens, 2 * SIZE, first_position=at)).results
    assert grown.failures[0].status == cpb.OPERATION_STATUS_LATER
    world.core.set_cached_shares({"ann": 6 / 16})
    pass_time(world, [bob, eve, dave], num_s=1)
    eve.send(ops.free([1]))
    eve.settle()
    world.pump()
    pass_time(world, [bob, eve, dave], num_s=1)
    dave.admit(1, range(SIZE))
    world.core.check_integrity()


def test_who_withholds_receipts_is_ended_beside_a_floor() -> None:
    world = World(num_host=0, config=CoreConfig(watermark=0.0))
    world.core.set_cached_shares({"ann": 6 / 16})
    ann, bob, carol = (world.engine(name) for name in ("ann", "bob", "carol"))
    compute(ann, range(6 * SIZE))
    bob.admit(1, range(1000, 1000 + 5 * SIZE))
    bob.settle()
    at = bob.sequences[1].num_scheduled
    tokens = columns.pack(columns.INT32, range(SIZE))
    bob.step(ops.append(1, tokens, SIZE, first_position=at))  # is never receipted
    bob.step(ops.free([1]))
    wait_for(carol, 9)
    pass_time(world, [ann, bob, carol])
    assert bob.id not in world.core._sessions
    world.core.check_integrity()
