"""Reservations: what each session is guaranteed, and what the others must leave for it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from control_plane.blocks.integrity import check_reservations
from control_plane.blocks.reservations import Reservations


def test_a_session_is_guaranteed_its_longest_sequence_and_others_leave_what_it_lacks() -> None:
    reservations = Reservations()
    reservations.open(1)
    reservations.open(2)
    reservations.add_sequence(1, 5)
    reservations.add_sequence(1, 3)
    assert reservations.num_guaranteed_with(1, 4) == 5, "its longest alone counts"
    assert reservations.num_guaranteed_with(2, 4) == 9
    reservations.hold(1, [10, 11])
    assert (reservations.guarantee(1), reservations.shortfall(1)) == (5, 3)
    assert reservations.num_reserved_for_others(2) == 3
    assert reservations.num_reserved_for_others(1) == 0
    reservations.remove_sequence(1, 5)
    assert (reservations.guarantee(1), reservations.shortfall(1)) == (3, 1)


def test_a_block_that_two_tables_of_a_session_refer_to_counts_once() -> None:
    reservations = Reservations()
    reservations.open(1)
    reservations.add_sequence(1, 4)
    reservations.hold(1, [7])
    reservations.hold(1, [7, 8])
    assert reservations.shortfall(1) == 2
    reservations.release(1, [7])
    assert reservations.shortfall(1) == 2
    reservations.release(1, [7])
    assert reservations.shortfall(1) == 3
    assert reservations.held(1) == {8: 1}


TABLES = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 9), st.sets(st.integers(0, 9)).map(sorted)),
    max_size=12,
)


@given(tables=TABLES, num_ended=st.integers(0, 12))
def test_its_sums_are_those_of_its_sessions(
    tables: list[tuple[int, int, list[int]]], num_ended: int
) -> None:
    reservations = Reservations()
    for session_id in (1, 2, 3):
        reservations.open(session_id)
    for session_id, need, blocks in tables:
        reservations.add_sequence(session_id, need)
        reservations.hold(session_id, blocks)
    for session_id, need, blocks in tables[:num_ended]:
        reservations.release(session_id, blocks)
        reservations.remove_sequence(session_id, need)
    held: dict[int, Counter[int]] = {1: Counter(), 2: Counter(), 3: Counter()}
    needs: dict[int, int] = dict.fromkeys(held, 0)
    for session_id, need, blocks in tables[num_ended:]:
        held[session_id].update(blocks)
        needs[session_id] = max(needs[session_id], need)
    check_reservations(reservations, held)
    assert {i: reservations.guarantee(i) for i in held} == needs
