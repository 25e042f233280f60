"""Whether there is room: OK, LATER or NEVER, and what is missing."""

from __future__ import annotations

import pytest
from planning_rig import DEVICE, PlanningRig

from control_plane.planning.steps.room import (
    NoRoom,
    require_room,
    require_room_to_admit,
)
from kvplane import ops
from kvplane.v1 import control_pb2 as cpb

LATER, NEVER = cpb.OPERATION_STATUS_LATER, cpb.OPERATION_STATUS_NEVER


def test_a_session_can_have_its_own_retired_blocks_at_once() -> None:
    rig = PlanningRig(8)
    rig.admit(1, range(40))
    rig.step(ops.free([1]))
    require_room(rig.session, DEVICE, 8)


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
