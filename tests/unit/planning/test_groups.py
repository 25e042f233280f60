"""Groups: the forks of an admission are one sequence to the line."""

from __future__ import annotations

from control_plane.sharing.groups import Groups


def test_forks_of_forks_are_in_the_group_until_the_last_is_gone() -> None:
    groups = Groups()
    key = groups.new_key()
    groups.add(key, [1, 2])
    groups.fork(2, 3)
    assert groups.by_key(key).members == {1, 2, 3}
    assert groups.of(3) is groups.of(1)
    for sequence_id in (1, 2, 3):
        group = groups.remove(sequence_id)
    assert not group.members
    assert groups.all() == []
    assert groups.new_key() != key


def test_a_fork_of_a_swapped_sequence_is_on_the_host_too() -> None:
    groups = Groups()
    groups.add(groups.new_key(), [1])
    group = groups.of(1)
    group.swapped.add(1)
    groups.fork(1, 2)
    assert not group.is_on_device
    group.swapped.discard(2)
    assert group.is_on_device
