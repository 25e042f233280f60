"""Publish after write: a block is found by others when all of it is known and written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplane import ops
from tests.helpers.planning.planning_rig import BLOCK_SIZE, PlanningRig


@given(st.integers(1, 40), st.integers(0, 40))
def test_only_blocks_that_are_known_and_written_whole_are_published(
    num_known: int, num_computed: int
) -> None:
    rig = PlanningRig()
    rig.step(ops.admit(1, range(num_known), num_compute_tokens=num_computed))
    rig.run()
    num = min(num_known, num_computed) // BLOCK_SIZE
    assert [block for block, _ in rig.published()] == rig.state(1).table[:num]
    rig.run()
    assert rig.published() == [], "each once"
    assert rig.pool.counters().num_publications == num
    assert rig.found(range(40)) == num


def test_what_was_published_is_followed_by_what_comes_later() -> None:
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.run()
    rig.step(ops.append(1, range(12, 16), 4, first_positions=12))
    rig.run()
    head, tail = rig.state(1).table
    assert rig.published() == [(head, -1), (tail, head)]


def test_where_a_prefix_has_a_block_a_second_one_stays_private_and_what_follows_does_not() -> None:
    rig = PlanningRig()
    rig.step(ops.admit(1, range(8)), ops.admit(2, range(16), skip_prefix_lookup=True))
    rig.run()
    (first,), (other, second) = rig.state(1).table, rig.state(2).table
    assert first != other
    assert rig.published() in (
        [(first, -1), (second, first)],
        [(other, -1), (second, other)],
    )
    assert rig.found(range(16)) == 2
    rig.check()


def test_roots_share_nothing() -> None:
    rig = PlanningRig()
    rig.admit(1, range(8))
    rig.run()
    bob = rig.open(2, tenant="bob")
    assert rig.found(range(8)) == 1
    assert rig.found(range(8), session=bob) == 0


def test_a_sequence_that_is_moved_is_published_once_it_has_arrived() -> None:
    rig = PlanningRig()
    rig.admit(1, range(8))
    rig.step(ops.swap([1], "host"))
    rig.run()
    rig.published()
    rig.step(ops.append(1, [], 0, first_positions=8))
    rig.step(ops.swap([1], "device"))
    assert rig.published() == []
    rig.run()
    rig.check()


def test_what_a_second_block_holds_is_found_when_the_first_one_is_evicted() -> None:
    rig = PlanningRig(4)
    rig.step(ops.admit(1, range(8)))
    rig.step(ops.admit(2, range(8), skip_prefix_lookup=True))
    rig.run()
    rig.step(ops.free([1]))
    rig.run()
    rig.admit(3, range(100, 124))
    assert rig.found(range(8)) == 1, "sequence 2 holds it still"
    rig.check()


def test_a_freed_sequence_is_published_as_far_as_its_blocks_are_still_there() -> None:
    rig = PlanningRig(4)
    table = rig.admit(1, range(24)).table
    rig.step(ops.free([1]))
    taken = rig.admit(2, range(100, 116)).table
    assert table[2] in taken, "tails go first"
    rig.run()
    assert rig.found(range(24)) == 2
    rig.check()
