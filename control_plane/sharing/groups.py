"""Which live sequences of a session are forks of one admission.

For the line they are one sequence: they hold the same blocks. Fork, free and swap cost a dictionary
entry for each sequence here; appends cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable


class Group:
    """An admission and the live forks of it. ``key``: the line's name for it, never used again in
    the session. ``swapped``: members on the host tier. ``in_line``: whether the line has it among
    those that hold device blocks.
    """

    __slots__ = ("in_line", "key", "members", "swapped")

    def __init__(self, key: int, members: Iterable[int]) -> None:
        self.key = key
        self.members = set(members)
        self.swapped: set[int] = set()
        self.in_line = True

    @property
    def is_on_device(self) -> bool:
        """Whether a member holds device blocks."""
        return len(self.members) > len(self.swapped)


class Groups:
    """All groups of one session. Sequence ids passed are of live sequences."""

    __slots__ = ("_by_id", "_by_key", "_last_key")

    def __init__(self) -> None:
        self._by_id: dict[int, Group] = {}
        self._by_key: dict[int, Group] = {}
        self._last_key = 0

    def new_key(self) -> int:
        """A key for an admission."""
        self._last_key += 1
        return self._last_key

    def of(self, sequence_id: int) -> Group:
        """The group of a sequence."""
        return self._by_id[sequence_id]

    def by_key(self, key: int) -> Group:
        """The group that the line calls ``key``."""
        return self._by_key[key]

    def add(self, key: int, sequence_ids: Iterable[int]) -> None:
        """These sequences were admitted together."""
        group = self._by_key[key] = Group(key, sequence_ids)
        self._by_id.update(dict.fromkeys(group.members, group))

    def fork(self, parent_id: int, sequence_id: int) -> None:
        """A sequence was forked."""
        group = self._by_id[sequence_id] = self._by_id[parent_id]
        group.members.add(sequence_id)
        if parent_id in group.swapped:
            group.swapped.add(sequence_id)

    def remove(self, sequence_id: int) -> Group:
        """A sequence is gone; returns its group, which may be empty now."""
        group = self._by_id.pop(sequence_id)
        group.members.remove(sequence_id)
        group.swapped.discard(sequence_id)
        if not group.members:
            del self._by_key[group.key]
        return group

    def all(self) -> list[Group]:
        """Every group."""
        return list(self._by_key.values())
