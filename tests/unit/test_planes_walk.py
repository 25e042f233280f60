"""Whatever fails, comes late, twice or back: no engine sees a value that is not its own, and when
it is over the whole pool can be had. See ``planes_machine``.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvplane import ops
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.planes.planes_engine import Engine
from tests.helpers.planes.planes_known import HOST
from tests.helpers.planes.planes_machine import HybridMachine, PlanesMachine
from tests.helpers.planes.planes_values import BLOCK
from tests.helpers.planes.planes_world import LEASE_S, World


def test_no_engine_sees_what_is_not_its_own() -> None:
    walk(max_examples=80, derandomize=True)


def test_no_engine_reads_a_state_of_another_prefix() -> None:
    walk(max_examples=40, derandomize=True, machine=HybridMachine)


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


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_longer_walks() -> None:
    walk(max_examples=4000)


def walk(
    *,
    max_examples: int,
    derandomize: bool = False,
    machine: type[PlanesMachine] = PlanesMachine,
) -> None:
    """A failure is shown as it was found: to shorten it takes minutes."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=80,
            deadline=None,
            derandomize=derandomize,
            database=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
