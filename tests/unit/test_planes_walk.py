"""Whatever fails, comes late, twice or back: no engine sees a value that is not its own, and when
it is over the whole pool can be had. See ``planes_machine``.
"""

from __future__ import annotations

from random import Random

import pytest

from kvplane import Layout, ops
from kvplane.wire.v1 import prefix_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.planes.planes_engine import Engine
from tests.helpers.planes.planes_known import HOST
from tests.helpers.planes.planes_machine import HybridMachine, PlanesMachine, end_all
from tests.helpers.planes.planes_values import BLOCK, HYBRID, LAYOUT
from tests.helpers.planes.planes_walks import walk
from tests.helpers.planes.planes_world import LEASE_S, POOL, World

NUM_WALKS = 16
COMES_BACK = 400302  # a data plane leaves before it hears of a Forget, and registers anew
RARE = ["passes run", "host contents forgotten", "layers repeated"]


def test_no_engine_sees_what_is_not_its_own() -> None:
    happened = walk(PlanesMachine, [*range(NUM_WALKS), COMES_BACK])
    missing = {what for what in RARE if not happened[what]}
    assert not missing, f"of {NUM_WALKS} walks none met {missing}"


def test_no_engine_reads_a_state_of_another_prefix() -> None:
    assert walk(HybridMachine, range(NUM_WALKS // 2))["checkpoints read"]


@pytest.mark.parametrize("layout", [LAYOUT, HYBRID], ids=["attention", "states"])
def test_what_was_forgotten_is_not_loaded_before_its_files_are_gone(layout: Layout) -> None:
    """A plan is made after a forget, and started at data planes that have not heard of it."""
    machine = PlanesMachine()
    machine.rng = Random(0)
    machine.world = world = World(
        num_shards=2, layout=layout, num_device=12, num_host=0, num_uses=1
    )
    engine = Engine(world, world.control, ("ann", ""))
    machine.engines = [engine]

    def compute(i: int) -> int:
        before = world.happened["blocks loaded"]
        admit = ops.admit(
            i,
            [0] * (2 * BLOCK),
            skip_prefix_lookup=True,
            checkpoint_position=2 * BLOCK if layout is HYBRID else 0,
        )
        engine.step(admit)
        engine.run_all()
        engine.step()
        return world.happened["blocks loaded"] - before

    compute(1)
    world.deliver_all()
    while any(process.files.write(machine.rng) for process in world.processes):
        pass
    assert compute(2)
    meant = set(world.findable_contents(world.control))
    request = prefix_pb2.ForgetPrefixesRequest(
        pool_id=POOL, scope=prefix_pb2.FORGET_SCOPE_TENANT, force=True
    )
    machine.ask("forget_prefixes", request, ("ann", ""))
    world.control.forgotten |= meant
    assert not compute(3)
    world.check()
    world.deliver_all()
    assert not compute(4)
    world.check()
    world.close()


def test_the_walk_knows_what_the_line_took() -> None:
    """A swap-in waits for blocks, so an idle sequence of another session is cut."""
    machine = PlanesMachine()
    machine.rng = Random(0)
    machine.world = world = World(
        num_shards=1, by_layers=False, num_device=4, num_host=2, watermark=0.0
    )
    holder, waiter = machine.engines = [
        Engine(world, world.control, (name, "")) for name in ("ann", "bob")
    ]
    for engine, *operations in (
        (waiter, ops.admit(1, [0] * BLOCK)),
        (waiter, ops.swap([1], "host")),
        (holder, ops.admit(2, [1] * (4 * BLOCK - 1))),
        (holder, ops.append(2, [], 1, first_positions=4 * BLOCK - 1)),
        (waiter, ops.swap([1], "device")),
    ):
        engine.step(*operations)
        engine.run_all()
        engine.step()
    assert waiter.sequences[1].tier == HOST
    for _ in range(3):
        world.clock.now += LEASE_S * 0.4
        for engine in machine.engines:
            engine.control.core.renew_session(engine.ref, engine.tenant)
        world.control.core.tick()
    holder.check()
    assert 2 in holder.sequences, "it was not told yet"
    holder.call("abort_plans", cpb.AbortPlansRequest(whole_tables=True))
    holder.run_all()  # a plan without it
    holder.step(ops.append(2, [0], 1, first_positions=4 * BLOCK))
    assert holder.cut == {2}
    assert not holder.sequences
    late = cpb.StepRequest(deferred_tokens=holder.old_tokens[-1])
    holder.call("step", late)  # what comes of it is passed over
    machine.all_is_sound()
    machine.teardown()


@pytest.mark.parametrize("by_layers", [False, True])
@pytest.mark.parametrize("layout", [LAYOUT, HYBRID], ids=["plain", "hybrid"])
def test_the_walk_takes_blocks_from_files(by_layers: bool, layout: Layout) -> None:
    world = World(
        num_shards=2, by_layers=by_layers, layout=layout, num_device=12, num_host=0, num_uses=1
    )
    engine = Engine(world, world.control, ("ann", ""))
    at = [0, 2 * BLOCK, 3 * BLOCK] if layout is HYBRID else [0]
    for i, position in enumerate(at, 1):
        tokens = [0] * (3 * BLOCK)
        engine.step(ops.admit(i, tokens, checkpoint_position=position, skip_prefix_lookup=True))
        engine.run_all()
        engine.step()
    world.deliver_all()
    for process in world.processes:
        assert process.files is not None
        while process.files.tier.files.num_files < 3 + len(at) - 1:
            process.files.write(Random(0))
    position = min(2 * BLOCK, at[-1])
    tokens = [0] * (2 * BLOCK)
    engine.step(ops.admit(4, tokens, checkpoint_position=position, skip_prefix_lookup=True))
    engine.run_all()
    assert world.happened["blocks loaded"] == 2 * 2
    assert world.happened["checkpoints loaded"] == 2 * bool(position)
    end_all(world, [engine])
    world.close()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_longer_walks() -> None:
    walk(PlanesMachine, range(1000, 4000))
    walk(HybridMachine, range(1000, 2000))
