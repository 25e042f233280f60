"""What always holds: a test for each statement of the design, and a random walk over them all."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvplane import ops
from kvplane.errors import (
    BadSignatureError,
    PlanReceiptedError,
    SessionExpiredError,
    StaleEpochError,
    StaleIncarnationError,
    StepConflictError,
)
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_machine import CoreMachine
from tests.helpers.core.core_messages import HOST, changes_of
from tests.helpers.core.core_model import FAILED, LATER, NEVER, OK, World, status_of

SETTINGS = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_statement_01_conservation() -> None:
    world = World(num_device=10, num_host=4)
    engine = world.engine()
    engine.admit(1, range(20), max_total_tokens=48)
    engine.admit(2, range(100, 117))
    engine.send(ops.fork(1, 3), ops.swap([2], "host"))
    engine.step(ops.free([1]))
    usage = world.usage()
    assert usage == {"free": 4, "cached": 0, "held": 6, "retired": 0}
    engine.run_all()
    engine.settle()
    usage = world.usage()
    assert usage == {"free": 5, "cached": 2, "held": 3, "retired": 0}
    assert sum(world.usage(HOST).values()) == 4
    world.core.check_integrity()


def test_statement_02_nobody_writes_a_shared_or_published_block() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(12))
    engine.send(ops.fork(1, 2))
    engine.settle()
    shared = engine.table(1)[1]
    engine.append(1, 12)
    assert engine.table(1)[1] != shared
    assert engine.table(2)[1] == shared
    engine.admit(3, range(8))
    published = engine.table(1)[0]
    assert engine.table(3)[0] != published, "the last token of a cached prompt is written apart"
    engine.run_all()
    engine.check()


def test_statement_03_publish_after_write() -> None:
    world = World()
    writer, reader = world.engine(), world.engine()
    writer.step(ops.admit(1, range(16)))
    assert reader.cached(1, range(17)) == 0
    writer.run_all()
    reader.send(ops.free([1]))
    skipped = reader.admit(2, range(17), skip_prefix_lookup=True)
    assert status_of(skipped.results[0]) == OK
    writer.settle()
    assert reader.cached(3, range(17)) == 16


def test_statement_04_reuse_after_quiet() -> None:
    world = World(num_device=4)
    one, other = world.engine(), world.engine()
    one.admit(1, range(8 * 3 + 1))
    one.step(ops.free([1]))
    assert world.usage()["retired"] == 4
    (later,) = other.step(ops.admit(1, range(50, 70))).results[0].failures
    assert later.status == LATER
    assert later.shortage.num_blocks_pending == 4
    own = one.step(ops.admit(2, range(50, 70)))
    assert status_of(own.results[0]) == OK, "its own plans run in order"
    one.run_all()
    one.settle()
    world.core.check_integrity()


def test_statement_05_all_or_nothing() -> None:
    world = World(num_device=4)
    engine = world.engine()
    engine.admit(1, range(8))
    before = world.pool().usage
    result = engine.step(
        ops.admit(2, range(8 * 9)),
        ops.admit(3, range(50, 50 + 8 * 4)),
        ops.append(9, [1], 1, first_positions=0),
        ops.admit(4, b"\xff\xff\xff\xff"),
        ops.append(1, [8], 0, first_positions=8),
    )
    statuses = [status_of(operation) for operation in result.results]
    assert statuses == [NEVER, LATER, FAILED, FAILED, OK]
    assert not result.HasField("plan")
    assert world.pool().usage == before


def test_statement_06_exact_prefixes() -> None:
    world = World()
    ann, bob = world.engine("ann"), world.engine("bob")
    ann.admit(1, range(17))
    assert ann.cached(2, range(17)) == 16
    other = [*range(7), 99, *range(8, 17)]
    assert ann.cached(3, other) == 0
    assert bob.cached(1, range(17)) == 0


def test_statement_07_three_answers() -> None:
    world = World(num_device=4)
    engine = world.engine()
    assert status_of(engine.step(ops.admit(1, range(8 * 4 + 1))).results[0]) == NEVER
    assert status_of(engine.admit(1, range(8 * 3)).results[0]) == OK
    assert status_of(engine.step(ops.admit(2, range(60, 76))).results[0]) == LATER
    engine.send(ops.free([1]))
    engine.settle()
    assert status_of(engine.admit(2, range(60, 60 + 32)).results[0]) == OK


def test_statement_08_stale_references_are_refused() -> None:
    world = World(num_device=4)
    engine = world.engine()
    engine.admit(1, range(8))
    ((_, index, generation),) = engine.blocks(1)
    engine.send(ops.free([1]))
    engine.settle()
    engine.admit(2, range(50, 50 + 32))
    assert {i: g for _, i, g in engine.blocks(2)}[index] == generation + 1
    engine.step(ops.free([2]))
    engine.run_all()
    receipt = plan_pb2.Receipt.FromString(engine.receipts[0].payload)
    receipt.epoch += 1
    with pytest.raises(StaleEpochError, match=r"receipts\[0\]"):
        engine.submit([world.shards[0].sign_receipt(receipt)])
    receipt.epoch -= 1
    receipt.plan_digest = b"forged"
    with pytest.raises(BadSignatureError, match=r"receipts\[0\]"):
        engine.submit([world.shards[0].sign_receipt(receipt)])
    engine.ref.incarnation += 1
    with pytest.raises(StaleIncarnationError, match=r"session\.incarnation"):
        engine.step()


def test_statement_09_retry_is_safe() -> None:
    world = World()
    engine = world.engine()
    engine.step(ops.admit(1, range(8)))
    engine.repeat(engine.sent[-1])
    with pytest.raises(StepConflictError):
        world.core.step(cpb.StepRequest(session=engine.ref, number=1), engine.tenant)
    engine.run_all()
    engine.settle()
    with pytest.raises(PlanReceiptedError):
        engine.abort(1)
    engine.repeat(engine.sent[-1])
    engine.step(engine.growth(1, [8, 9], 2))
    engine.abort(engine.number)
    engine.repeat(engine.sent[-1])
    assert engine.state(1).num_tokens == 8
    plan = plan_pb2.Plan.FromString(engine.resync().plan.payload)
    engine.repeat(engine.sent[-1])
    assert plan.resync
    assert len(changes_of(plan)) == 1


def test_statement_10_soft_state() -> None:
    world = World(num_shards=2)
    engine = world.engine()
    engine.admit(1, range(20))
    world.pump()
    world.restart_control_plane()
    with pytest.raises(StaleIncarnationError):
        engine.renew()
    engine = world.engine()
    assert engine.cached(1, range(20)) == 16
    world.shards[1].restart()
    world.shards[1].join()
    with pytest.raises(StaleEpochError):
        engine.renew()
    world.pump()
    engine = world.engine()
    assert engine.cached(1, range(20)) == 0


def test_statement_11_a_step_answers_the_same_in_any_company() -> None:
    alone, crowded = World(num_device=40), World(num_device=40)
    other = crowded.engine("other")
    other.admit(1, range(70, 90))
    one, two = alone.engine(), crowded.engine()
    for engine in (one, two):
        engine.admit(1, range(20))
        engine.append(1, 20, 21)
    assert one.state(1) == two.state(1)
    assert [m.plan.spans for m in one.queue] == [m.plan.spans for m in two.queue]


def test_statement_12_a_lease_is_renewed_by_messages() -> None:
    world = World()
    silent, loud = world.engine(), world.engine()
    silent.admit(1, range(8))
    world.core.tick()
    for _ in range(4):
        world.clock.now += 10
        loud.renew()
        world.core.tick()
    with pytest.raises(SessionExpiredError):
        silent.renew()
    assert world.usage()["retired"] == 1, "until the data plane has quit it"
    world.pump()
    assert world.usage()["held"] == world.usage()["retired"] == 0
    for slept_s in (16, 31, 1000):  # more than half a lease between two ticks, and more than all
        world.clock.now += slept_s
        world.core.tick()
        world.clock.now += 14.9
        world.core.tick()
        loud.renew()  # all leases ran anew from the tick after the sleep


def test_a_random_walk_keeps_every_invariant() -> None:
    """The same walks each time; the long ones differ from night to night."""
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(SETTINGS, max_examples=100, stateful_step_count=40, derandomize=True),
    )


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_long_random_walk_keeps_every_invariant() -> None:
    run_state_machine_as_test(
        CoreMachine, settings=settings(SETTINGS, max_examples=1500, stateful_step_count=80)
    )
