"""Publish after write: a block is found by others when all of it is known and written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from planning_rig import BLOCK_SIZE, DEVICE, HOST, PlanningRig

from control_plane.planning.sequence import Sequence
from control_plane.planning.steps.publish import expect_publication, publish
from kvplane import ops


def placed(rig: PlanningRig, tokens: range, num_written: int, sequence_id: int = 1) -> Sequence:
    """A sequence of these tokens in blocks of its own, ``num_written`` slots of them written."""
    sequence = Sequence(sequence_id, 1, ops.pack_tokens(tokens), need=0)
    sequence.table = rig.session.allocate(DEVICE, -(-max(1, num_written) // BLOCK_SIZE))
    sequence.num_written = sequence.num_scheduled = num_written
    rig.session.add(sequence)
    return sequence


@given(st.integers(0, 40), st.integers(0, 40))
def test_only_blocks_that_are_known_and_written_whole_are_published(
    num_tokens: int, num_written: int
) -> None:
    rig = PlanningRig()
    sequence = placed(rig, range(num_tokens), num_written)
    num = min(num_tokens, num_written) // BLOCK_SIZE
    assert publish(rig.session, sequence) == sequence.table[:num]
    assert publish(rig.session, sequence) == [], "each once"
    assert rig.pool.counters.num_publications == num
    found = rig.pool.device.index.match(rig.session.root, ops.pack_tokens(range(40)))
    assert found == sequence.table[:num]


def test_what_was_published_is_followed_by_what_comes_later() -> None:
    rig = PlanningRig()
    sequence = placed(rig, range(12), 12)
    publish(rig.session, sequence)
    sequence.tokens += ops.pack_tokens(range(12, 16))
    sequence.num_written = 16
    assert publish(rig.session, sequence) == sequence.table[1:]
    assert rig.pool.device.index.parents(sequence.table) == [-1, sequence.table[0]]


def test_where_a_prefix_has_a_block_a_second_one_stays_private_and_what_follows_does_not() -> None:
    rig = PlanningRig()
    first = placed(rig, range(8), 8)
    second = placed(rig, range(16), 16, sequence_id=2)
    publish(rig.session, first)
    assert publish(rig.session, second) == second.table[1:]
    index = rig.pool.device.index
    assert index.match(rig.session.root, ops.pack_tokens(range(16))) == [
        first.table[0],
        second.table[1],
    ]
    assert index.entries[second.table[0]] is None


def test_roots_share_nothing() -> None:
    rig = PlanningRig()
    publish(rig.session, placed(rig, range(8), 8))
    bob = rig.open(2, tenant="bob")
    assert rig.pool.device.index.match(bob.root, ops.pack_tokens(range(8))) == []


def test_a_sequence_that_is_moved_is_published_once_it_has_arrived() -> None:
    rig = PlanningRig()
    sequence = placed(rig, range(8), 8)
    sequence.moved_by = 3
    assert publish(rig.session, sequence) == []
    rig.session.done = 3
    sequence.tier = HOST
    assert publish(rig.session, sequence) == []
    sequence.tier = DEVICE
    assert publish(rig.session, sequence) == sequence.table


def test_publishing_begins_again_where_the_block_before_was_evicted() -> None:
    rig = PlanningRig(4)
    other = placed(rig, range(8), 8)
    publish(rig.session, other)
    sequence = placed(rig, range(8), 16, sequence_id=2)
    assert publish(rig.session, sequence) == [], "the prefix has the other's block"
    rig.session.release(DEVICE, other.table, 1)
    rig.pool.device.plans_finished(1, 1)
    rig.session.allocate(DEVICE, 2)
    assert rig.pool.num_evictions() == 1
    sequence.tokens += ops.pack_tokens(range(8, 16))
    assert publish(rig.session, sequence) == sequence.table


def test_children_of_a_block_that_is_filled_again_are_announced_with_it() -> None:
    """Their parent is another block now."""
    rig = PlanningRig(4)
    first = placed(rig, range(16), 16)
    publish(rig.session, first)
    head, tail = first.table
    rig.session.release(DEVICE, [head], 1)
    first.table = [tail]
    rig.pool.device.plans_finished(1, 1)
    rig.session.allocate(DEVICE, 3)
    second = Sequence(2, 1, ops.pack_tokens(range(8)), need=0)
    second.table, second.num_written = [head], 8
    assert publish(rig.session, second) == [head, tail]
    assert rig.pool.counters.num_publications == 3


def test_a_freed_sequence_is_published_as_far_as_its_blocks_are_still_there() -> None:
    rig = PlanningRig(4)
    sequence = placed(rig, range(24), 24)
    sequence.num_written = 0
    rig.session.release(DEVICE, sequence.table[::-1], 1)
    assert expect_publication(rig.session, sequence)
    taken = rig.session.allocate(DEVICE, 2)
    assert sequence.table[2] in taken, "tails go first"
    sequence.num_written = 24
    assert publish(rig.session, sequence) == sequence.table[:2]


def test_nothing_is_expected_of_what_receipts_can_not_publish() -> None:
    rig = PlanningRig()
    short = placed(rig, range(7), 7)
    assert not expect_publication(rig.session, short)
    done = placed(rig, range(8), 8, sequence_id=2)
    publish(rig.session, done)
    assert not expect_publication(rig.session, done)
    swapped = placed(rig, range(8), 8, sequence_id=3)
    swapped.tier = HOST
    assert not expect_publication(rig.session, swapped)
    assert short.generations is done.generations is swapped.generations is None
