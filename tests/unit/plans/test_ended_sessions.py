"""Ended sessions as ranges: exactly those that were added, in as few ranges as there can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from data_plane.plans.sessions import EndedSessions


@given(st.lists(st.integers(1, 40)))
def test_they_are_a_set_in_the_fewest_ranges(ordinals: list[int]) -> None:
    ended, known = EndedSessions(), set[int]()
    for ordinal in ordinals:
        ended.add(ordinal)
        known.add(ordinal)
        assert {n for n in range(42) if n in ended} == known
        assert len(ended._first) == sum(n - 1 not in known for n in known)
