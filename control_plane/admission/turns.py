"""Sessions, their live sequences, the clocks of their turns, and the sessions' seniority.

Seniority orders sessions: it is lost, to the most junior place, when a sequence of the session
ends, is freed or swapped out, or is cut because its turn is over or it is idle. It is kept when a
sequence yields to growth; else the same session could be cut for ever.
"""

from __future__ import annotations

import heapq
from typing import Final

from control_plane.admission.decisions import Reason


class Claimant:
    """A session in the queue's view. ``num_doublings``: how often its turn was doubled. Its live
    sequences come oldest first. ``is_busy``: whether a request of it is paused between two slices.
    """

    __slots__ = ("id", "is_busy", "num_doublings", "penalty_until_s", "seniority", "sequences")

    def __init__(self, id_: int, seniority: int) -> None:
        self.id: Final = id_
        self.seniority = seniority  # the lower, the more senior
        self.num_doublings = 0
        self.is_busy = False
        self.penalty_until_s = 0.0  # until then it lets others pass in the queue
        self.sequences: dict[int, Claim] = {}

    def is_passed_over(self, now_s: float) -> bool:
        """Says whether others are admitted before this session, although it is ahead of them."""
        return self.penalty_until_s > now_s or (self.num_doublings > 0 and len(self.sequences) > 0)


class Claim:
    """A live sequence in the queue's view. ``num_blocked``: how many blocks of growth it has waited
    for since ``blocked_s``.
    """

    __slots__ = (
        "blocked_s",
        "deadline_s",
        "ends_s",
        "id",
        "idles_s",
        "in_heap",
        "num_blocked",
        "num_doublings",
        "penalty_s",
        "rank",
        "reason",
        "session",
    )

    def __init__(self, session: Claimant, id_: int, rank: int) -> None:
        self.session: Final = session
        self.id: Final = id_
        self.rank = rank  # the lower, the older
        self.ends_s = 0.0  # of its turn; put off while it is blocked
        self.idles_s = 0.0  # it is not idle before then; then the pool is asked again
        self.num_doublings = session.num_doublings
        self.num_blocked = 0
        self.blocked_s = 0.0
        self.in_heap = False
        self.deadline_s: float | None = None  # when it is cut, if it was asked to yield
        self.reason: Reason | None = None  # why it is asked to yield; None while it is not
        self.penalty_s = 0.0  # how long its session lets others pass if it is cut for that reason


class Turns:
    """Holds a pool's sessions and their live sequences, with the clock of each one's turn."""

    def __init__(self, turn_s: float, max_doublings: int) -> None:
        self.sessions: dict[int, Claimant] = {}
        self.num_live = 0
        self.num_blocked = 0  # blocks that blocked growth waits for, over all sequences
        self.asked: set[Claim] = set()  # those with a deadline
        self._turn_s = turn_s
        self._max_doublings = max_doublings
        self._heap: list[tuple[int, Claim]] = []  # a heap by rank, of those ever blocked
        self._next_rank = 0
        self._next_seniority = 0

    def open(self, session: int) -> None:
        """Add a session, as the most junior one."""
        self.sessions[session] = Claimant(session, 0)
        self._make_junior(self.sessions[session])

    def close(self, session: int) -> None:
        """Remove a session with all its sequences."""
        for sequence in list(self.sessions[session].sequences.values()):
            self._remove(sequence)
        del self.sessions[session]

    def start(self, session: int, sequence: int, now_s: float) -> None:
        """Add a sequence that holds device blocks from now on."""
        owner = self.sessions[session]
        assert sequence not in owner.sequences
        started = owner.sequences[sequence] = Claim(owner, sequence, self._next_rank)
        started.ends_s = now_s + self.length_s(started)
        owner.penalty_until_s = 0.0  # its penalty is over, or there was nobody to let pass
        self._next_rank += 1
        self.num_live += 1

    def end(self, sequence: Claim, *, reason: Reason | None, done: bool) -> None:
        """Remove a sequence that holds no device blocks any more. ``reason``: why it was made to
        yield; None when its session released it. ``done``: whether it will not come back; without a
        reason, its turn was then long enough.
        """
        session = sequence.session
        self._remove(sequence)
        if reason in (Reason.TURN, Reason.IDLE) and sequence.penalty_s:
            since_s = max(session.penalty_until_s, sequence.deadline_s or 0.0)
            session.penalty_until_s = since_s + sequence.penalty_s
        if reason is Reason.TURN:
            num_doublings = min(sequence.num_doublings + 1, self._max_doublings)
            session.num_doublings = max(session.num_doublings, num_doublings)
        elif done and reason is None:
            session.num_doublings = 0
        if reason is not Reason.GROWTH:
            self._make_junior(session)

    def length_s(self, sequence: Claim) -> float:
        """Return the length of the sequence's turn in seconds."""
        return self._turn_s * (1 << sequence.num_doublings)

    # Blocked growth

    def blocked(self) -> list[Claim]:
        """Return all sequences whose growth is blocked."""
        return [sequence for _, sequence in self._heap if sequence.num_blocked]

    def oldest_blocked(self) -> Claim | None:
        """Return the oldest sequence whose growth is blocked, None if there is none."""
        while self._heap and not self._heap[0][1].num_blocked:
            heapq.heappop(self._heap)[1].in_heap = False
        return self._heap[0][1] if self._heap else None

    def block(self, sequence: Claim, num_blocks: int, now_s: float) -> None:
        """Record that the sequence waits for ``num_blocks`` blocks to grow, which stops its turn's
        clock; a later number replaces an earlier one.
        """
        if not sequence.num_blocked:
            sequence.blocked_s = now_s
            if not sequence.in_heap:
                sequence.in_heap = True
                heapq.heappush(self._heap, (sequence.rank, sequence))
        self.num_blocked += num_blocks - sequence.num_blocked
        sequence.num_blocked = num_blocks

    def unblock(self, sequence: Claim, now_s: float) -> None:
        """Record that the sequence waits for growth no more, which resumes its turn's clock."""
        if sequence.num_blocked:
            self.num_blocked -= sequence.num_blocked
            sequence.num_blocked = 0
            sequence.ends_s += now_s - sequence.blocked_s

    def _remove(self, sequence: Claim) -> None:
        session = sequence.session
        self.num_blocked -= sequence.num_blocked
        sequence.num_blocked = 0
        self.asked.discard(sequence)
        del session.sequences[sequence.id]
        self.num_live -= 1

    def _make_junior(self, session: Claimant) -> None:
        self._next_seniority += 1
        session.seniority = self._next_seniority
