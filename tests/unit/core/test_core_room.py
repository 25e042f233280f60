"""OK, LATER or NEVER: whether there is room, and what is in the way."""

from __future__ import annotations

from control_plane.config import CoreConfig
from kvplane import ops
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import DEVICE, HOST
from tests.helpers.core.core_model import LATER, NEVER, OK, World, status_of


def only(result: cpb.StepResponse) -> cpb.OperationResult:
    (operation,) = result.results
    return operation


def test_the_watermark_leaves_blocks_free_once_something_is_held() -> None:
    engine = World(num_device=10, config=CoreConfig(watermark=0.2)).engine()
    assert status_of(engine.admit(1, range(8 * 5)).results[0]) == OK
    (later,) = only(engine.step(ops.admit(2, range(100, 132)))).failures
    assert later.status == LATER
    assert later.shortage.reason == cpb.SHORTAGE_REASON_HEADROOM
    assert (later.shortage.num_blocks_needed, later.shortage.num_blocks_available) == (4, 3)
    assert later.shortage.retry_delay.ToMilliseconds() == 50
    assert status_of(engine.admit(2, range(100, 124)).results[0]) == OK


def test_nothing_is_reserved_for_what_a_session_says_it_will_need() -> None:
    world = World(num_device=10)
    one, other = world.engine(), world.engine()
    one.admit(1, range(8), max_total_tokens=80)
    assert status_of(other.admit(1, range(200, 200 + 72)).results[0]) == OK
    (later,) = only(one.step(one.growth(1, [8], 1))).failures
    assert (later.status, later.shortage.reason) == (LATER, cpb.SHORTAGE_REASON_BLOCKS)


def test_shared_blocks_count_once_however_many_sequences_hold_them() -> None:
    """Two sessions with the same cached prompt of ten blocks fit a pool of twelve."""
    world = World(num_device=12)
    one, other = world.engine(), world.engine()
    prompt = range(80)
    assert status_of(one.admit(1, prompt, max_total_tokens=88).results[0]) == OK
    assert status_of(other.admit(1, prompt, max_total_tokens=88).results[0]) == OK
    assert world.usage()["held"] == 11


def test_a_shortage_says_what_is_in_the_way() -> None:
    world = World(num_device=4, num_host=1)
    one, other = world.engine(), world.engine()
    one.admit(1, range(24))
    (later,) = only(other.step(ops.admit(1, range(50, 66)))).failures
    assert (later.status, later.shortage.reason) == (LATER, cpb.SHORTAGE_REASON_BLOCKS)
    assert later.shortage.tier == DEVICE
    assert (later.shortage.num_blocks_needed, later.shortage.num_blocks_available) == (2, 1)
    assert (later.shortage.num_blocks_pending, later.shortage.queue_position) == (0, 0)
    one.step(ops.free([1]))
    (later,) = only(other.step(ops.admit(1, range(50, 66)))).failures
    assert later.shortage.num_blocks_pending == 3
    (never,) = only(other.step(ops.admit(1, range(33)))).failures
    assert (never.status, never.shortage.reason) == (NEVER, cpb.SHORTAGE_REASON_BLOCKS)
    assert not never.shortage.HasField("retry_delay")
    one.run_all()
    one.settle()
    other.admit(1, [1])
    other.admit(2, [2] * 8)
    (never,) = only(other.step(ops.swap([1, 2], "host"))).failures
    assert (never.status, never.shortage.tier) == (NEVER, HOST)
