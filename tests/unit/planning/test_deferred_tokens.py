"""Deferred tokens: known once, in any number of pieces, and never others than those known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.steps.deferred_tokens import take_deferred_tokens
from kvplane import ops
from kvplane.errors import InvalidRequestError
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.planning.planning_rig import PlanningRig


def reserved(num_slots: int = 9) -> PlanningRig:
    """Sequence 1, of step 1, knows tokens 0 to 6 and has ``num_slots`` slots without tokens."""
    rig = PlanningRig()
    rig.admit(1, range(7))
    rig.step(ops.append(1, (), num_slots, first_positions=7))
    return rig


def take(rig: PlanningRig, message: cpb.DeferredTokens, *, max_items: int = 9) -> None:
    take_deferred_tokens(rig.session, message, max_items)


def test_blocks_that_were_written_are_published_once_their_tokens_are_known() -> None:
    rig = reserved()
    rig.run()
    assert rig.found(range(16)) == 0
    take(rig, ops.deferred_tokens([1], [1], [7], [1], [7]))
    assert rig.found(range(16)) == 1
    rig.pool.announce()
    assert rig.published() == [(rig.state(1).table[0], -1)], "data planes are told of one block"
    take(rig, ops.deferred_tokens([1, 1], [1, 1], [8, 10], [2, 6], range(8, 16)))
    assert rig.found(range(16)) == 2
    rig.check()


@given(st.lists(st.tuples(st.integers(0, 18), st.integers(1, 8)), max_size=8))
def test_pieces_that_touch_what_is_known_add_what_is_new(pieces: list[tuple[int, int]]) -> None:
    rig = reserved()
    num_known, num_slots = 7, 16
    for first, num in pieces:
        ok = first <= num_known and (first + num <= num_slots or first + num <= num_known)
        message = ops.deferred_tokens([1], [1], [first], [num], range(first, first + num))
        if ok:
            take(rig, message)
            num_known = max(num_known, first + num)
        else:
            with pytest.raises(InvalidRequestError):
                take(rig, message)
        assert rig.state(1).num_tokens == num_known


def test_more_sequences_than_the_limit_are_refused_unread() -> None:
    message = cpb.DeferredTokens(sequence_ids=bytes(8 * 10))
    with pytest.raises(InvalidRequestError) as refused:
        take(reserved(), message)
    assert refused.value.field == "deferred_tokens.sequence_ids"
