"""Groups the live sequences of a session by the admission that they are forks of.

For the queue they are one sequence: they hold the same blocks. Fork, free and swap cost a
dictionary entry for each sequence here; appends cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable


class Family:
    """An admission and the live forks of it. ``key``: the queue's name for it, never used again in
    the session. ``swapped``: members on the host tier. ``is_live``: whether the queue has it among
    those that hold device blocks.
    """

    __slots__ = ("is_live", "key", "members", "swapped")

    def __init__(self, key: int, members: Iterable[int]) -> None:
        self.key = key
        self.members = set(members)
        self.swapped: set[int] = set()
        self.is_live = True

    @property
    def is_on_device(self) -> bool:
        """Whether a member holds device blocks."""
        return len(self.members) > len(self.swapped)


class Families:
    """All families of one session. Sequence ids passed are of live sequences."""

    __slots__ = ("_by_id", "_by_key", "_last_key")

    def __init__(self) -> None:
        self._by_id: dict[int, Family] = {}
        self._by_key: dict[int, Family] = {}
        self._last_key = 0

    def new_key(self) -> int:
        """Return a key for an admission, never used before."""
        self._last_key += 1
        return self._last_key

    def of(self, sequence_id: int) -> Family:
        """Return the family of a sequence."""
        return self._by_id[sequence_id]

    def by_key(self, key: int) -> Family:
        """Return the family that the queue calls ``key``."""
        return self._by_key[key]

    def add(self, key: int, sequence_ids: Iterable[int]) -> None:
        """Add sequences that were admitted together."""
        family = self._by_key[key] = Family(key, sequence_ids)
        self._by_id.update(dict.fromkeys(family.members, family))

    def fork(self, parent_id: int, sequence_id: int) -> None:
        """Add a fork of a sequence to its family."""
        family = self._by_id[sequence_id] = self._by_id[parent_id]
        family.members.add(sequence_id)
        if parent_id in family.swapped:
            family.swapped.add(sequence_id)

    def remove(self, sequence_id: int) -> Family:
        """Remove a sequence; returns its family, which may be empty now."""
        family = self._by_id.pop(sequence_id)
        family.members.remove(sequence_id)
        family.swapped.discard(sequence_id)
        if not family.members:
            del self._by_key[family.key]
        return family

    def all(self) -> list[Family]:
        """Return every family."""
        return list(self._by_key.values())
