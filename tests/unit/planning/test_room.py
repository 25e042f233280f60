"""Whether there is room: OK, LATER or NEVER, and what is missing."""

from __future__ import annotations

from kvplane import ops
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.planning.planning_rig import DEVICE, HOST, PlanningRig

LATER, NEVER = cpb.ITEM_STATUS_LATER, cpb.ITEM_STATUS_NEVER


def failure_of(rig: PlanningRig, operation: cpb.Operation) -> cpb.ItemFailure:
    (result,), _ = rig.step(operation)
    (failure,) = result.failures
    return failure


def test_a_session_can_have_its_own_retired_blocks_at_once() -> None:
    rig = PlanningRig(8)
    rig.admit(1, range(40))
    rig.step(ops.free([1]))
    assert len(rig.admit(2, range(100, 164)).table) == 8


def test_nothing_is_reserved_by_declared_length() -> None:
    rig = PlanningRig(8)
    other = rig.open(2)
    rig.step(ops.admit(1, range(8), max_total_tokens=64), session=other)
    assert len(rig.admit(1, range(100, 156)).table) == 7
    assert failure_of(rig, ops.admit(2, range(3), max_total_tokens=65)).status == NEVER


def cached_prompt(num_device_blocks: int) -> PlanningRig:
    """A prompt of 16 tokens, held by a sequence of another session and found by all."""
    rig = PlanningRig(num_device_blocks)
    other = rig.open(2)
    rig.admit(1, range(16), session=other)
    rig.run(session=other)
    return rig


def test_hits_cost_nothing_while_others_hold_them() -> None:
    rig = cached_prompt(3)
    assert rig.admit(1, range(20)).num_cached == 16


def test_a_prompt_that_is_all_cached_needs_a_copy_of_its_last_block() -> None:
    rig = cached_prompt(4)
    assert rig.admit(1, range(16)).num_cached == 15
    failure = failure_of(rig, ops.admit(2, range(32)))
    assert (failure.status, failure.shortage.num_blocks_needed) == (LATER, 2)


def test_where_there_is_no_room_for_the_copy_the_last_block_is_computed_anew() -> None:
    rig = cached_prompt(2)
    rig.step(ops.free([1]), session=rig.sessions[2])
    rig.run(session=rig.sessions[2])
    assert rig.admit(1, range(16)).num_cached == 8


def test_room_ends_where_the_tier_does() -> None:
    rig = PlanningRig(4, 2)
    never = failure_of(rig, ops.admit(1, range(33)))
    assert (never.status, never.shortage.tier) == (NEVER, DEVICE)
    assert (never.shortage.num_blocks_needed, never.shortage.num_blocks_available) == (5, 4)
    assert never.shortage.reason == cpb.SHORTAGE_REASON_BLOCKS
    assert not never.shortage.HasField("retry_delay")
    rig.admit(1, range(24))
    rig.run()
    never = failure_of(rig, ops.swap([1], "host"))
    assert (never.status, never.shortage.tier) == (NEVER, HOST)
    assert (never.shortage.num_blocks_needed, never.shortage.num_blocks_available) == (3, 2)
