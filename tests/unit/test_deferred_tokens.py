"""Deferred tokens: known once, in any number of pieces, and never others than those known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_rig import PlanningRig

from control_plane.planning.deferred_tokens import take_deferred_tokens
from kvplane import ops
from kvplane.errors import InvalidRequestError, KvplaneError, SequenceNotFoundError
from kvplane.v1 import control_pb2 as cpb


def reserved(num_slots: int = 9) -> PlanningRig:
    """Sequence 1, of step 1, knows tokens 0 to 6 and has ``num_slots`` slots without tokens."""
    rig = PlanningRig()
    rig.admit(1, range(7))
    rig.step(ops.append(1, (), num_slots, first_position=7))
    return rig


def take(rig: PlanningRig, message: cpb.DeferredTokens, *, max_items: int = 9) -> None:
    take_deferred_tokens(rig.session, message, max_items)


def test_blocks_that_were_written_are_published_once_their_tokens_are_known() -> None:
    rig = reserved()
    rig.run()
    index, root = rig.pool.device.index, rig.session.root
    prompt = ops.pack_tokens(range(16))
    assert index.match(root, prompt) == []
    take(rig, ops.deferred_tokens([1], [1], [7], [1], [7]))
    assert len(index.match(root, prompt)) == 1
    (message,) = rig.pool.shards.states[0].outgoing
    assert len(message.publish.publications.indices) == 4, "data planes are told of one block"
    take(rig, ops.deferred_tokens([1, 1], [1, 1], [8, 10], [2, 6], range(8, 16)))
    assert len(index.match(root, prompt)) == 2
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
        assert rig.session.sequences[1].tokens == ops.pack_tokens(range(num_known))


BAD: dict[str, tuple[cpb.DeferredTokens, type[KvplaneError], str]] = {
    "unknown sequence": (
        ops.deferred_tokens([1, 9], [1, 1], [7, 0], [1, 1], [7, 0]),
        SequenceNotFoundError,
        "sequence_ids[1]",
    ),
    "another sequence of its id": (
        ops.deferred_tokens([1], [2], [7], [1], [7]),
        SequenceNotFoundError,
        "admitted_by[0]",
    ),
    "a gap": (
        ops.deferred_tokens([1, 1], [1, 1], [7, 9], [1, 1], [7, 9]),
        InvalidRequestError,
        "first_positions[1]",
    ),
    "a negative position": (
        ops.deferred_tokens([1], [1], [-1], [1], [0]),
        InvalidRequestError,
        "first_positions[0]",
    ),
    "no slots": (
        ops.deferred_tokens([1], [1], [7], [10], range(7, 17)),
        InvalidRequestError,
        "num_tokens[0]",
    ),
    "no tokens": (
        ops.deferred_tokens([1], [1], [7], [0], []),
        InvalidRequestError,
        "num_tokens[0]",
    ),
    "other tokens": (
        ops.deferred_tokens([1, 1], [1, 1], [7, 5], [1, 2], [7, 5, 66]),
        InvalidRequestError,
        "token_ids[1]",
    ),
    "a negative token": (
        ops.deferred_tokens([1], [1], [7], [2], [7, -8]),
        InvalidRequestError,
        "token_ids[1]",
    ),
    "a short column": (
        ops.deferred_tokens([1], [], [7], [1], [7]),
        InvalidRequestError,
        "admitted_by",
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_what_is_wrong_is_named_and_nothing_of_the_request_is_taken(reason: str) -> None:
    rig = reserved()
    message, error, column = BAD[reason]
    with pytest.raises(error) as refused:
        take(rig, message)
    assert refused.value.field == f"deferred_tokens.{column}"
    assert rig.session.sequences[1].num_tokens == 7


def test_more_sequences_than_the_limit_are_refused_unread() -> None:
    message = cpb.DeferredTokens(sequence_ids=bytes(8 * 10))
    with pytest.raises(InvalidRequestError) as refused:
        take(reserved(), message)
    assert refused.value.field == "deferred_tokens.sequence_ids"
