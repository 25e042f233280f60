"""Which sessions have ended for good, as ranges of their ordinals in the pool.

Sessions are numbered from 1 as they are opened, and every one that ends is fenced, so there is at
most one more range than there are sessions open on the pool.
"""

from __future__ import annotations

from bisect import bisect_right


class EndedSessions:
    """A set of ordinals that only grows."""

    def __init__(self) -> None:
        # Range i is [_first[i], _last[i]]. Ranges ascend, and no two are adjacent.
        self._first: list[int] = []
        self._last: list[int] = []

    def __contains__(self, ordinal: int) -> bool:
        i = bisect_right(self._first, ordinal) - 1
        return i >= 0 and ordinal <= self._last[i]

    @property
    def num_ranges(self) -> int:
        """Number of ranges kept."""
        return len(self._first)

    def add(self, ordinal: int) -> None:
        """Add an ordinal, joining adjacent ranges. Does nothing if it is in the set."""
        if ordinal in self:
            return
        i = bisect_right(self._first, ordinal)
        joins_before = i > 0 and self._last[i - 1] == ordinal - 1
        joins_after = i < len(self._first) and self._first[i] == ordinal + 1
        if joins_before and joins_after:
            self._last[i - 1] = self._last.pop(i)
            del self._first[i]
        elif joins_before:
            self._last[i - 1] = ordinal
        elif joins_after:
            self._first[i] = ordinal
        else:
            self._first.insert(i, ordinal)
            self._last.insert(i, ordinal)
