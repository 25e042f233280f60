"""What each session is guaranteed of the device blocks, and what it still lacks of that.

    guarantee   the longest live sequence of a session can grow to its need, whatever others do
    shortfall   max(0, guarantee - distinct blocks that the session holds): kept from the others

        │◄─────────────── guarantee ───────────────►│
        │ held by the session │◄──── shortfall ────►│

Guarantees never add up to more than the pool has, so at any time some session that waits is sure to
finish. Reserved blocks are a number and no particular blocks: whatever is free or cached when the
session asks.

Invariant: ``num_guaranteed`` and ``num_reserved`` are the sums over sessions of guarantee and
shortfall. Session ids and block indices are ints; callers check before they change, nothing fails.
"""

from __future__ import annotations


class _Session:
    __slots__ = ("guarantee", "held", "needs")

    def __init__(self) -> None:
        self.guarantee = 0
        self.held: dict[int, int] = {}  # block -> table entries of the session that refer to it
        self.needs: dict[int, int] = {}  # need in blocks -> live sequences that have it

    @property
    def shortfall(self) -> int:
        lacking = self.guarantee - len(self.held)
        return lacking if lacking > 0 else 0


class Reservations:
    """The guarantees of all sessions of one pool."""

    __slots__ = ("_sessions", "num_guaranteed", "num_reserved")

    def __init__(self) -> None:
        self.num_guaranteed = 0
        self.num_reserved = 0
        self._sessions: dict[int, _Session] = {}

    def open(self, session_id: int) -> None:
        """A session without sequences begins."""
        self._sessions[session_id] = _Session()

    def close(self, session_id: int) -> None:
        """The session, whose sequences were removed and whose blocks were released, ends."""
        del self._sessions[session_id]

    # What there is

    def guarantee(self, session_id: int) -> int:
        """The largest need of the session's live sequences, blocks."""
        return self._sessions[session_id].guarantee

    def shortfall(self, session_id: int) -> int:
        """Guaranteed blocks that the session does not hold."""
        return self._sessions[session_id].shortfall

    def held(self, session_id: int) -> dict[int, int]:
        """For each block that the session holds, how many of its table entries refer to it."""
        return dict(self._sessions[session_id].held)

    def num_reserved_for_others(self, session_id: int) -> int:
        """Blocks that other sessions lack of what they are guaranteed."""
        return self.num_reserved - self._sessions[session_id].shortfall

    def num_guaranteed_with(self, session_id: int, need: int) -> int:
        """What all sessions would be guaranteed together if this one had a sequence of ``need``."""
        return self.num_guaranteed + max(0, need - self._sessions[session_id].guarantee)

    # Changes

    def add_sequence(self, session_id: int, need: int) -> None:
        """A sequence that may grow to ``need`` blocks lives from now on."""
        session = self._sessions[session_id]
        session.needs[need] = session.needs.get(need, 0) + 1
        if need > session.guarantee:
            self._guarantee(session, need)

    def remove_sequence(self, session_id: int, need: int) -> None:
        """A sequence of ``need`` blocks lives no more."""
        session = self._sessions[session_id]
        session.needs[need] -= 1
        if not session.needs[need]:
            del session.needs[need]
            if need == session.guarantee:
                self._guarantee(session, max(session.needs, default=0))

    def hold(self, session_id: int, blocks: list[int]) -> None:
        """One more table entry of the session refers to each block."""
        session = self._sessions[session_id]
        before = session.shortfall
        held = session.held
        if held.keys().isdisjoint(blocks):
            held.update(dict.fromkeys(blocks, 1))
        else:
            for block in blocks:
                held[block] = held.get(block, 0) + 1
        self.num_reserved += session.shortfall - before

    def release(self, session_id: int, blocks: list[int]) -> None:
        """One table entry of the session less refers to each block."""
        session = self._sessions[session_id]
        before = session.shortfall
        held = session.held
        for block in blocks:
            if held[block] == 1:
                del held[block]
            else:
                held[block] -= 1
        self.num_reserved += session.shortfall - before

    def _guarantee(self, session: _Session, num_blocks: int) -> None:
        before = session.shortfall
        self.num_guaranteed += num_blocks - session.guarantee
        session.guarantee = num_blocks
        self.num_reserved += session.shortfall - before
