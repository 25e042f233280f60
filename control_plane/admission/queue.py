"""The queue for the device blocks of one pool: what may be admitted, what may grow, who yields.

Nothing is reserved, and nothing that a client declares is believed. Without most of these rules
``tests/unit/admission/test_admission_checker.py`` finds a session that can be starved; for each
part of them ``tests/mutants/faults/admission.txt`` says which test fails when it is left out.

1. **One place a session, first come, first served.** A waiting admission stands until it is
   admitted or withdrawn, and nobody passes the head. Without it, sessions that ask often or for
   little starve the others.
2. **Grants are pushed.** A sequence that is granted blocks has them, and its turn runs. An offer
   that has to be accepted would stop the queue when it is not.
3. **Growth before admissions**, the oldest sequence first, and no younger growth passes. Without
   it, what a session frees goes to its own next admission while others cannot grow: a deadlock.
4. **Growth blocked for a grace period makes the most junior session yield**, its newest sequence
   first. Otherwise sequences that wait for each other's blocks wait for ever. Nobody senior to all
   that are blocked yields, and of the most senior of these only what is newer.
5. **A sequence that outstays its turn yields while others wait**, and so does one that makes no
   progress for some time; the one furthest past first. Its session goes to the back of the queue.
   Otherwise sequences that hold blocks and never end keep them. The more a session holds beyond a
   quarter of the pool and twice its fair share, the shorter its turns.
6. **A turn that was cut doubles the session's next one**, until a sequence of it ends. Otherwise
   a sequence that needs longer than its turn is cut for ever. Idleness doubles nothing. Until then
   the session is not admitted beside a live sequence of its own. For every such turn after the
   first, even the first if idle or with much of the pool, it lets others pass: one turn for each
   fair share that it held. Otherwise the largest and longest holder gets most of the pool.
7. **The clock of a turn stands while its sequence is blocked.** Otherwise sequences that block each
   other are cut in turn, and none ever ends.
8. **A request to yield names the sequence and a deadline**; then the sequence is cut. One that
   leaves before its deadline counts as cut: a session neither loses nor gains by that.
9. **A busy session waits, and all behind it**, for the milliseconds that its request takes: it is
   cut and granted blocks between its requests only.
10. **A session whose missing receipts keep blocks from others is ended** after a deadline.

Swapping a sequence in is an admission: a growth that came before the queue could be repeated for
ever. All times are given by the caller, and never go back. Every operation is O(1), but for the
logarithm of the number of blocked sequences; ``tick`` scans sessions and live sequences.

The caller must act as follows, in this order, with nothing in between:

    admit -> None          allocate, then ``started``
    may_grow -> True       allocate
    a sequence leaves      release its blocks, ``ended`` or ``swapped_out``
    blocks came back       ``next_grant`` until None: allocate what each grant says, see there
    a timer                ``tick``; release what it cuts, close what it ends; ``next_grant``
"""

from __future__ import annotations

from collections import OrderedDict

from control_plane.admission.decisions import (
    Admission,
    AdmissionConfig,
    Cut,
    Decision,
    Grant,
    Growth,
    MustWait,
    PoolView,
    Reason,
)
from control_plane.admission.turns import Turns
from control_plane.admission.victims import QueueEntry, decide


class AdmissionQueue:
    """Decides which session gets a pool's blocks next. Raises KeyError for an unknown
    session id.
    """

    def __init__(self, pool: PoolView, config: AdmissionConfig | None = None) -> None:
        self._pool = pool
        self._config = config or AdmissionConfig()
        self._turns = Turns(self._config.turn_s, self._config.max_doublings)
        self._entries: OrderedDict[int, QueueEntry] = OrderedDict()
        self._next_ticket = 0

    @property
    def is_growth_blocked(self) -> bool:
        """Return whether some live sequence waits for blocks to grow."""
        return self._turns.num_blocked > 0

    @property
    def is_idle(self) -> bool:
        """Return whether nobody waits for blocks: any caller may then take free ones."""
        return not self._entries and not self._turns.num_blocked

    # Sessions

    def open(self, session: int) -> None:
        """Add a session, as the most junior one."""
        self._turns.open(session)

    def close(self, session: int) -> None:
        """Remove a session, its entry in the queue and all its sequences."""
        self._entries.pop(session, None)
        self._turns.close(session)

    def set_busy(self, session: int, is_busy: bool) -> None:
        """Mark a session as busy, which means that a request of it is paused between two slices. A
        busy session is neither granted blocks nor cut.
        """
        self._turns.sessions[session].is_busy = is_busy

    # Admissions

    def admit(
        self, session: int, sequence: int, num_needed: int, now_s: float, *, wait: bool
    ) -> MustWait | None:
        """Return None when the sequence may be admitted now: the caller then admits it and calls
        ``started``. Otherwise return why it has to wait.

        ``num_needed``: obtainable blocks that it would take, at most all of the pool's. With
        ``wait`` it enters the queue, if its session has no entry there yet. Asking again keeps the
        position and updates the number.
        """
        must_wait = self.check_admission(session, sequence, num_needed, now_s, wait=wait)
        entry = self._entries.get(session)
        if entry is not None and entry.sequence == sequence:
            entry.num_needed = num_needed
        elif must_wait is not None and must_wait.sequence == sequence:
            owner = self._turns.sessions[session]
            self._to_the_back(QueueEntry(owner, sequence, num_needed, now_s, 0))
        return must_wait

    def check_admission(
        self, session: int, sequence: int, num_needed: int, now_s: float, *, wait: bool
    ) -> MustWait | None:
        """Return what ``admit`` would return, without changing the queue."""
        assert num_needed <= self._pool.num_blocks, "never fits"
        entry, blocked = self._entries.get(session), self._turns.num_blocked > 0
        if entry is not None and entry.sequence != sequence:
            return MustWait(Reason.QUEUE, self._position(entry.ticket), entry.sequence)
        is_first = self._is_first(session, now_s)
        if not blocked and is_first and self._has_room(session, num_needed):
            return None
        reason = Reason.GROWTH if blocked else Reason.BLOCKS if is_first else Reason.QUEUE
        if entry is None and not wait:
            return MustWait(reason)
        ticket = self._next_ticket if entry is None else entry.ticket
        return MustWait(reason, self._position(ticket), sequence)

    def withdraw(self, session: int, sequence: int) -> None:
        """Remove a sequence's entry from the queue, as it need not be admitted any more."""
        entry = self._entries.get(session)
        if entry is not None and entry.sequence == sequence:
            del self._entries[session]

    # Sequences

    def started(self, session: int, sequence: int, now_s: float) -> None:
        """Begin the turn of a sequence that was admitted or swapped in, and holds its blocks."""
        self.withdraw(session, sequence)
        self._turns.start(session, sequence, now_s)

    def ended(self, session: int, sequence: int) -> None:
        """Remove a sequence that has ended with its forks; not for one that the queue has cut."""
        self._leave(session, sequence, done=True)

    def swapped_out(self, session: int, sequence: int) -> None:
        """Remove a sequence that has left the device tier, but may come back, by ``admit``."""
        self._leave(session, sequence, done=False)

    def may_grow(
        self,
        session: int,
        sequence: int,
        num_needed: int,
        now_s: float,
        *,
        num_awaited: int | None = None,
        fits: bool | None = None,
    ) -> bool:
        """Return whether a live sequence may take ``num_needed`` blocks now; the caller then
        allocates them. ``fits``: whether there is room for them, by default as their number says.

        If not, the sequence waits for ``num_awaited`` of them, by default all, until it is granted
        these, asks for another number, leaves, or ``stop_growth`` is called. It does not wait for
        blocks that it could have now, or for more than the pool could give to it alone.
        """
        turns, pool = self._turns, self._pool
        growing = turns.sessions[session].sequences[sequence]
        if self.check_growth(session, sequence, num_needed, fits=fits):
            turns.unblock(growing, now_s)
            return True
        num_awaited = num_needed if num_awaited is None else num_awaited
        is_given = not num_awaited or self.check_growth(session, sequence, num_awaited)
        if is_given or pool.num_held(session, sequence) + num_awaited > pool.num_blocks:
            turns.unblock(growing, now_s)
        else:
            turns.block(growing, num_awaited, now_s)
        return False

    def stop_growth(self, session: int, sequence: int, now_s: float) -> None:
        """Let a live sequence wait for no growth any more."""
        self._turns.unblock(self._turns.sessions[session].sequences[sequence], now_s)

    def num_awaited(self, session: int, sequence: int) -> int:
        """Return how many blocks a live sequence waits for to grow."""
        return self._turns.sessions[session].sequences[sequence].num_blocked

    def check_growth(
        self, session: int, sequence: int, num_needed: int, *, fits: bool | None = None
    ) -> bool:
        """Return what ``may_grow`` would return, without changing the queue."""
        if fits is None:
            fits = num_needed <= self._pool.num_obtainable(session)
        rank = self._turns.sessions[session].sequences[sequence].rank
        oldest = self._turns.oldest_blocked()
        is_oldest = oldest is None or rank <= oldest.rank
        return is_oldest and fits

    def live(self, session: int) -> set[int]:
        """Return the session's sequences that hold device blocks, and so have a turn."""
        return set(self._turns.sessions[session].sequences)

    def is_busy(self, session: int) -> bool:
        """Return whether the session was marked as busy."""
        return self._turns.sessions[session].is_busy

    # Grants when blocks come back, and decisions when they do not

    def next_grant(self, now_s: float) -> Grant | None:
        """Return which admission or growth gets blocks now. Call it until it returns None, whenever
        blocks came back.

        A sequence whose Growth is returned no longer waits. After an Admission, before the next
        call: call ``started`` once it is done, or ``admit`` again if it now needs more.
        """
        oldest = self._turns.oldest_blocked()
        if oldest is not None:
            session, num_blocks = oldest.session.id, oldest.num_blocked
            if oldest.session.is_busy or num_blocks > self._pool.num_obtainable(session):
                return None
            self._turns.unblock(oldest, now_s)
            return Growth(session, oldest.id, num_blocks)
        head = self._take_head(now_s)
        if head is None or head.session.is_busy:
            return None
        if not self._has_room(head.session.id, head.num_needed):
            return None
        return Admission(head.session.id, head.sequence, head.num_needed)

    def tick(self, now_s: float) -> list[Decision]:
        """Decide which sequences are asked to yield or are cut, and which sessions are ended. Call
        it about four times in a grace period.

        Each sequence of a Cut has left the queue; call ``close`` for each EndSession.
        """
        decisions = decide(
            self._turns,
            self._entries,
            self._take_head(now_s),
            self._pool,
            self._config,
            self.num_headroom(),
            now_s,
        )
        for decision in decisions:
            if isinstance(decision, Cut):
                self._leave(decision.session, decision.sequence, done=False)
        return decisions

    def _leave(self, session: int, sequence: int, *, done: bool) -> None:
        leaving = self._turns.sessions[session].sequences[sequence]
        reason = leaving.reason
        self._turns.end(leaving, reason=reason, done=done)
        entry = self._entries.get(session)
        if reason in (Reason.TURN, Reason.IDLE) and entry is not None:
            entry.is_chosen = False
            self._to_the_back(entry)

    def _find_head(self, now_s: float) -> QueueEntry | None:
        """Return the first entry that need not let others pass, or the first if all have to."""
        entries = self._entries.values()
        ready = (e for e in entries if e.is_chosen or not e.session.is_passed_over(now_s))
        return next(ready, next(iter(entries), None))

    def _take_head(self, now_s: float) -> QueueEntry | None:
        """Return the first entry that need not let others pass; those before it move to
        the back.
        """
        head = self._find_head(now_s)
        if head is None:
            return None
        while (first := next(iter(self._entries.values()))) is not head:
            self._to_the_back(first)
        head.is_chosen = head.is_chosen or head.session.is_passed_over(now_s)
        return head

    def _is_first(self, session: int, now_s: float) -> bool:
        head = self._find_head(now_s)
        return head is None or head.session.id == session

    def _has_room(self, session: int, num_needed: int) -> bool:
        return num_needed + self.num_headroom() <= self._pool.num_obtainable(session)

    def num_headroom(self) -> int:
        """Return how many blocks admissions leave free for growth. None in an empty pool, or a
        prompt of nearly its size would never be admitted.
        """
        return int(self._config.headroom * self._pool.num_blocks) if self._turns.num_live else 0

    def _position(self, ticket: int) -> int:
        return ticket - next(iter(self._entries.values())).ticket + 1 if self._entries else 1

    def _to_the_back(self, entry: QueueEntry) -> None:
        entry.ticket = self._next_ticket
        self._next_ticket += 1
        self._entries[entry.session.id] = entry
        self._entries.move_to_end(entry.session.id)
