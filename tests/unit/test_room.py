"""Whether there is room: OK, LATER or NEVER, and what is missing."""

from __future__ import annotations

import pytest
from planning_rig import DEVICE, HOST, PlanningRig

from control_plane.planning.room import (
    NoRoom,
    require_fits,
    require_room,
    require_room_to_admit,
)
from kvplane import ops
from kvplane.v1 import control_pb2 as cpb

LATER, NEVER = cpb.OPERATION_STATUS_LATER, cpb.OPERATION_STATUS_NEVER


def test_what_is_larger_than_the_tier_never_fits() -> None:
    pool = PlanningRig(8, 4).pool
    require_fits(pool, 8)
    require_fits(pool, 4, HOST)
    for tier, num in ((DEVICE, 9), (HOST, 5)):
        with pytest.raises(NoRoom) as refused:
            require_fits(pool, num, tier)
        shortage = refused.value.shortage
        assert refused.value.status == NEVER
        assert (shortage.tier, shortage.num_blocks_needed) == (tier, num)
        assert shortage.num_blocks_available == num - 1
        assert not shortage.HasField("retry_delay"), "asking again can not help"


def test_blocks_that_others_hold_are_missing_until_they_are_released() -> None:
    rig = PlanningRig(8)
    other = rig.open(2)
    rig.admit(1, range(40), session=other)
    require_room(rig.session, DEVICE, 3)
    rig.step(ops.free([1]), session=other)
    with pytest.raises(NoRoom) as refused:
        require_room(rig.session, DEVICE, 4)
    shortage = refused.value.shortage
    assert refused.value.status == LATER
    assert shortage.reason == cpb.SHORTAGE_REASON_BLOCKS
    assert (shortage.num_blocks_available, shortage.num_blocks_pending) == (3, 5)
    assert shortage.retry_delay.nanos == 50_000_000
    rig.run(session=other)
    require_room(rig.session, DEVICE, 8)


def test_a_session_can_have_its_own_retired_blocks_at_once() -> None:
    rig = PlanningRig(8)
    rig.admit(1, range(40))
    rig.step(ops.free([1]))
    require_room(rig.session, DEVICE, 8)


def test_blocks_that_others_are_guaranteed_are_reserved_and_not_missing() -> None:
    rig = PlanningRig(8)
    other = rig.open(2)
    rig.step(ops.admit(1, range(8), max_total_tokens=40), session=other)
    require_room(rig.session, DEVICE, 3)
    with pytest.raises(NoRoom) as refused:
        require_room(rig.session, DEVICE, 4)
    assert refused.value.shortage.reason == cpb.SHORTAGE_REASON_RESERVED
    require_room(other, DEVICE, 7)
    require_room(rig.session, HOST, 4)


def test_guarantees_never_add_up_to_more_than_the_pool() -> None:
    rig = PlanningRig(8)
    other = rig.open(2)
    rig.step(ops.admit(1, range(8), max_total_tokens=40), session=other)
    assert require_room_to_admit(rig.session, 3, 1, 8, []) == ([], False)
    with pytest.raises(NoRoom) as refused:
        require_room_to_admit(rig.session, 4, 1, 8, [])
    assert refused.value.shortage.num_blocks_needed == 4
    # Of one session only the longest sequence counts.
    assert require_room_to_admit(other, 8, 1, 8, []) == ([], False)


def test_admissions_leave_headroom_that_appends_may_use() -> None:
    rig = PlanningRig(8, watermark=0.25)
    assert require_room_to_admit(rig.session, 8, 8, 64, []) == ([], False), "nothing is held"
    rig.admit(1, range(8))
    with pytest.raises(NoRoom) as refused:
        require_room_to_admit(rig.session, 6, 6, 48, [])
    shortage = refused.value.shortage
    assert (shortage.reason, shortage.num_blocks_available) == (cpb.SHORTAGE_REASON_HEADROOM, 5)
    assert require_room_to_admit(rig.session, 5, 5, 40, []) == ([], False)
    require_room(rig.session, DEVICE, 7)


def cached_prompt(num_device_blocks: int) -> tuple[PlanningRig, list[int]]:
    """A prompt of 16 tokens, held by a sequence of another session and found by all."""
    rig = PlanningRig(num_device_blocks)
    other = rig.open(2)
    sequence = rig.admit(1, range(16), session=other)
    rig.run(session=other)
    return rig, sequence.table


def test_hits_cost_nothing_while_others_hold_them() -> None:
    rig, hits = cached_prompt(3)
    assert require_room_to_admit(rig.session, 1, 3, 20, hits) == (hits, False)


def test_a_prompt_that_is_all_cached_needs_a_copy_of_its_last_block() -> None:
    rig, hits = cached_prompt(3)
    assert require_room_to_admit(rig.session, 1, 2, 16, hits) == (hits, True)
    with pytest.raises(NoRoom):
        require_room_to_admit(rig.session, 1, 4, 32, hits)


def test_where_there_is_no_room_for_the_copy_the_last_block_is_computed_anew() -> None:
    rig, hits = cached_prompt(2)
    rig.step(ops.free([1]), session=rig.sessions[2])
    rig.run(session=rig.sessions[2])
    assert require_room_to_admit(rig.session, 2, 2, 16, hits) == (hits[:1], False)
