"""The device blocks that each session is guaranteed, and how many of them it still lacks.

    guarantee   the longest live sequence of a session can grow to its need, whatever others do
    shortfall   max(0, guarantee - distinct blocks that the session holds): kept from others

        │◄─────────────── guarantee ───────────────►│
        │ held by the session │◄──── shortfall ────►│

Guarantees never add up to more than the pool has, so at any time some session that waits is sure to
finish. A reservation is a number, not particular blocks: what is free or cached when the session
allocates.

Invariant: ``num_guaranteed`` and ``num_reserved`` are the sums over sessions of guarantee and
shortfall. Session ids and block indices are ints. Callers check first; nothing here fails.
"""

from __future__ import annotations


class _Session:
    __slots__ = ("guarantee", "held", "needs")

    def __init__(self) -> None:
        self.guarantee = 0
        self.held: dict[int, int] = {}  # block -> table entries of the session that refer to it
        self.needs: dict[int, int] = {}  # need in blocks -> how many live sequences have it

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
        """Add a session, which has no sequences yet."""
        self._sessions[session_id] = _Session()

    def close(self, session_id: int) -> None:
        """Remove a session whose sequences were removed and whose blocks were released."""
        del self._sessions[session_id]

    # Queries

    def guarantee(self, session_id: int) -> int:
        """The largest need of the session's live sequences, in blocks."""
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
        """Add a live sequence that may grow to ``need`` blocks."""
        session = self._sessions[session_id]
        session.needs[need] = session.needs.get(need, 0) + 1
        if need > session.guarantee:
            self._guarantee(session, need)

    def remove_sequence(self, session_id: int, need: int) -> None:
        """Remove a live sequence of ``need`` blocks."""
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
        """One fewer table entry of the session refers to each block."""
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
