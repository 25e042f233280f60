"""Families: the forks of an admission are one sequence to the queue."""

from __future__ import annotations

from control_plane.sessions.families import Families


def test_forks_of_forks_are_in_the_family_until_the_last_is_gone() -> None:
    families = Families()
    key = families.new_key()
    families.add(key, [1, 2])
    families.fork(2, 3)
    assert families.by_key(key).members == {1, 2, 3}
    assert families.of(3) is families.of(1)
    for sequence_id in (1, 2, 3):
        family = families.remove(sequence_id)
    assert not family.members
    assert families.all() == []
    assert families.new_key() != key


def test_a_fork_of_a_swapped_sequence_is_on_the_host_too() -> None:
    families = Families()
    families.add(families.new_key(), [1])
    family = families.of(1)
    family.swapped.add(1)
    families.fork(1, 2)
    assert not family.is_on_device
    family.swapped.discard(2)
    assert family.is_on_device
