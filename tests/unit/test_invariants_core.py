"""What always holds: a test for each statement of the design, and a random walk over them all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_data_plane import pack
from core_machine import CoreMachine
from core_model import World
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from control_plane.planning.model import Admit, Append, Fork, Free, Status, SwapOut, Tier
from kvplane.errors import (
    BadSignatureError,
    PlanReceiptedError,
    SessionExpiredError,
    SessionNotFoundError,
    StaleEpochError,
    StepConflictError,
)

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
    engine.send(Fork(1, 3), SwapOut((2,)))
    engine.step(Free(1))
    usage = world.usage()
    assert usage == {"free": 1, "cached": 0, "held": 6, "limbo": 0, "reserved": 3}
    engine.run_all()
    engine.settle()
    usage = world.usage()
    assert usage == {"free": 2, "cached": 2, "held": 3, "limbo": 0, "reserved": 3}
    assert sum(world.usage(Tier.HOST).values()) == 4
    world.core.check_integrity()


def test_statement_02_nobody_writes_a_shared_or_published_block() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(12))
    engine.send(Fork(1, 2))
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
    outcome = writer.step(Admit(1, pack(range(16))))
    assert outcome.plan is not None
    assert reader.cached(1, range(17)) == 0
    writer.run_all()
    reader.send(Free(1))
    assert reader.admit(2, range(17), skip_prefix_lookup=True).results[0].status is Status.OK
    writer.settle()
    assert reader.cached(3, range(17)) == 16


def test_statement_04_reuse_after_quiet() -> None:
    world = World(num_device=4)
    one, other = world.engine(), world.engine()
    one.admit(1, range(8 * 3 + 1))
    one.step(Free(1))
    assert world.usage()["limbo"] == 4
    later = other.step(Admit(1, pack(range(50, 70))))
    assert later.results[0].status is Status.LATER
    assert later.results[0].shortage.num_blocks_pending == 4  # type: ignore[union-attr]
    own = one.step(Admit(2, pack(range(50, 70))))
    assert own.results[0].status is Status.OK, "its own plans run in order"
    one.run_all()
    one.settle()
    world.core.check_integrity()


def test_statement_05_all_or_nothing() -> None:
    world = World(num_device=4)
    engine = world.engine()
    engine.admit(1, range(8))
    before = world.core.describe_pool("pool").usage
    outcome = engine.step(
        Admit(2, pack(range(8 * 9))),
        Admit(3, pack(range(50, 50 + 8 * 4))),
        Append(9, pack([1]), 1),
        Admit(4, b"\xff\xff\xff\xff"),
        Append(1, pack([8]), 0),
    )
    statuses = [result.status for result in outcome.results]
    assert statuses == [Status.NEVER, Status.LATER, Status.FAILED, Status.FAILED, Status.OK]
    assert outcome.plan is None
    assert world.core.describe_pool("pool").usage == before


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
    assert engine.step(Admit(1, pack(range(8 * 4 + 1)))).results[0].status is Status.NEVER
    assert engine.admit(1, range(8 * 3)).results[0].status is Status.OK
    assert engine.step(Admit(2, pack(range(60, 76)))).results[0].status is Status.LATER
    engine.send(Free(1))
    engine.settle()
    assert engine.admit(2, range(60, 60 + 32)).results[0].status is Status.OK


def test_statement_08_stale_names_are_refused() -> None:
    world = World(num_device=4)
    engine = world.engine()
    engine.admit(1, range(8))
    old, _ = world.core.block_table(engine.id, engine.tenant, 1)
    engine.send(Free(1))
    engine.settle()
    engine.admit(2, range(50, 50 + 32))
    new, _ = world.core.block_table(engine.id, engine.tenant, 2)
    again = {b.index: b.generation for b in new}[old[0].index]
    assert again == old[0].generation + 1
    engine.step(Append(2, b"", 0))
    made = engine.step(Free(2)).plan
    assert made is not None
    receipt = engine.receipt(engine.queue[-1])
    with pytest.raises(StaleEpochError, match=r"receipts\[0\]"):
        engine.submit([replace(receipt, epoch=receipt.epoch + 1)])
    with pytest.raises(BadSignatureError, match=r"receipts\[0\]"):
        engine.submit([replace(receipt, plan_digest=b"forged")])


def test_statement_09_retry_is_safe() -> None:
    world = World()
    engine = world.engine()
    first = engine.step(Admit(1, pack(range(8))))
    again = world.core.step(engine.id, engine.tenant, 1, [Admit(1, pack(range(8)))], content=b"1")
    assert again == first
    with pytest.raises(StepConflictError):
        world.core.step(engine.id, engine.tenant, 1, [], content=b"other")
    engine.run_all()
    engine.settle()
    with pytest.raises(PlanReceiptedError):
        engine.abort(1)
    engine.step(Append(1, pack([8, 9]), 2))
    engine.abort(2)
    assert engine.state(1).num_tokens == 8
    plan = world.plans[engine.resync().plan.digest]
    assert plan.resync
    assert len(plan.changes) == 1


def test_statement_10_soft_state() -> None:
    world = World(num_shards=2)
    engine = world.engine()
    engine.admit(1, range(20))
    world.pump()
    world.restart_control_plane()
    with pytest.raises(SessionNotFoundError):
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
    assert [m.plan.rows for m in one.queue] == [m.plan.rows for m in two.queue]


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
    assert world.usage()["limbo"] == 1, "until the data plane has quit it"
    world.pump()
    assert world.usage()["held"] == world.usage()["limbo"] == 0
    for slept_s in (16, 31, 1000):  # more than half a lease between two ticks, and more than all
        world.clock.now += slept_s
        world.core.tick()
        world.clock.now += 14.9
        world.core.tick()
        loud.renew()  # all leases ran anew from the tick after the sleep
    assert world.engine().id > loud.id


def test_a_random_walk_keeps_every_invariant() -> None:
    run_state_machine_as_test(
        CoreMachine, settings=settings(SETTINGS, max_examples=100, stateful_step_count=40)
    )


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_long_random_walk_keeps_every_invariant() -> None:
    run_state_machine_as_test(
        CoreMachine, settings=settings(SETTINGS, max_examples=1500, stateful_step_count=80)
    )
