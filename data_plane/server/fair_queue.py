"""Chooses whose command runs next on a thread that all callers share: of the callers that wait, the
one that has used the least time, and of its sessions the one that has used the least.

A caller that returns after a pause begins at the least time that a waiting caller has used: a pause
earns no credit. A command's time is not known before it has run, so it is charged afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Lane(NamedTuple):
    """A session of a caller, whose commands run in order. ``caller``: a tenant or connection."""

    caller: str
    session_id: int = 0


class FairQueue(Generic[T]):
    """Commands of many lanes: each caller gets an equal share of time. Not thread-safe."""

    def __init__(self) -> None:
        self._first: deque[T] = deque()
        self._waiting: dict[Lane, deque[T]] = {}
        self._of_callers = _Used()
        self._of_lanes = _Used()

    def __len__(self) -> int:
        return len(self._first) + sum(map(len, self._waiting.values()))

    def put(self, lane: Lane | None, command: T) -> None:
        """Queue a command. Commands without a lane run before all others."""
        if lane is None:
            self._first.append(command)
            return
        if lane not in self._waiting:
            self._waiting[lane] = deque()
            self._of_callers.begin(lane.caller)
            self._of_lanes.begin(lane)
        self._waiting[lane].append(command)

    def put_back(self, lane: Lane | None, command: T) -> None:
        """Queue the rest of a command in slices, before the other commands of its lane."""
        self.put(lane, command)
        waiting = self._first if lane is None else self._waiting[lane]
        waiting.rotate()

    def take(self) -> tuple[Lane | None, T]:
        """Remove and return the command to run next. There must be one."""
        if self._first:
            return None, self._first.popleft()
        lane = min(
            self._waiting, key=lambda each: (self._of_callers[each.caller], self._of_lanes[each])
        )
        waiting = self._waiting[lane]
        command = waiting.popleft()
        if not waiting:
            del self._waiting[lane]
        return lane, command

    def charge(self, lane: Lane | None, seconds: float) -> None:
        """Add the seconds of a lane's last command to the time used by lane and caller."""
        if lane is not None:
            self._of_callers.charge(lane.caller, seconds, {each.caller for each in self._waiting})
            self._of_lanes.charge(lane, seconds, self._waiting.keys())


class _Used:
    """The seconds that each caller or lane has used. One that comes back begins at the least that a
    waiting one has used.
    """

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}
        self._least = 0.0  # the least of those that waited when the last command ended

    def __getitem__(self, who: Hashable) -> float:
        return self._seconds[who]

    def begin(self, who: Hashable) -> None:
        self._seconds[who] = max(self._seconds.get(who, 0.0), self._least)

    def charge(self, who: Hashable, seconds: float, waiting: Collection[Hashable]) -> None:
        self._seconds[who] = self._seconds.get(who, self._least) + seconds
        if waiting:
            self._least = max(self._least, min(self._seconds[each] for each in waiting))
        else:
            self._least = max(self._seconds.values())
        # Without an entry, a caller or lane begins at the least time anyway.
        for each in [each for each, used in self._seconds.items() if used <= self._least]:
            if each not in waiting:
                del self._seconds[each]
