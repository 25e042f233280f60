"""Shares the blocks of one pool: asks the queue, and applies its decisions to sessions.

    operation of a session ──► the core has room, nobody waits ──► done
                           └─► otherwise it has the queue decide ──► done, LATER, or queued
    blocks came back, a timer ──► queued admissions and blocked growth are granted, sequences cut

While nobody waits and no growth is blocked, an operation costs no more than the core's own call.
Blocks that a blocked sequence is granted are in its table before it asks again. A swap-in keeps its
place while its session repeats it: the core moves blocks only within a step.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Final

from kvplane_blocks import _native

from control_plane.admission.decisions import (
    Admission,
    AdmissionConfig,
    Cut,
    EndSession,
    Growth,
    MustWait,
    Pressure,
    Reason,
)
from control_plane.admission.queue import AdmissionQueue
from control_plane.pools.pool import Pool
from control_plane.sessions.session import QueuedAdmission, Session, Wanted, forks_of
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

_DEVICE: Final = tpb.TIER_DEVICE
LATER: Final = (_native.LATER, _native.LATER_HEADROOM)
"""Code of the native core for an item that has no room now, on which the queue decides."""
_QUOTA: Final = (_native.LATER_QUOTA, _native.NEVER_QUOTA)
# A headroom larger than any pool: the core refuses, and says how many blocks are needed.
_PROBE: Final = 2**40
_ALL: Final = -1
# Names of an admission in the queue, before it is a family: the only one that its session may queue
# now, and one that comes while another entry of its session stands there. Families count from 1.
_ADMISSION: Final = 0
_OTHER: Final = -1
_REASONS: Final = {
    Reason.GROWTH: cpb.CUT_REASON_GROWTH,
    Reason.TURN: cpb.CUT_REASON_TURN,
    Reason.IDLE: cpb.CUT_REASON_IDLE,
}
# Sequences that were cut and are remembered to be so.
_MAX_REVOKED: Final = 4096
_GRANTS: Final = ("granted_sequence_ids", "granted_num_cached_tokens", "granted_num_blocks")


class PoolAdmission:
    """Shares a pool's blocks among its sessions, by the admission queue."""

    def __init__(
        self,
        pool: Pool,
        config: AdmissionConfig,
    ) -> None:
        self.sessions: dict[int, Session] = {}
        self.pool = pool
        self.news = PoolNews()
        self._config = config
        self._queue = AdmissionQueue(DeviceBlocks(pool, self.sessions), config)

    # Sessions

    def open(self, session: Session) -> None:
        """Add an open session to the queue's sessions."""
        self.sessions[session.id] = session
        self._queue.open(session.id)

    def close(self, session: Session) -> None:
        """Remove a session that ends, with its entry in the queue."""
        self._queue.close(session.id)
        del self.sessions[session.id]
        self.news.take(session)

    def set_busy(self, session_id: int, is_busy: bool) -> None:
        """Set whether a request of the session is paused between two slices. Meanwhile the session
        is neither granted blocks nor cut. Grants and cuts that fall due are made when the request
        ends, even if the session's next request begins at once.
        """
        if session_id in self.sessions:  # it may have ended
            self._queue.set_busy(session_id, is_busy)
            if not is_busy:
                self.tick()  # sessions that it finds to be ended, the next tick finds again

    def num_headroom(self) -> int:
        """Return how many device blocks admissions have to leave free."""
        return self._queue.num_headroom()

    # Operations of a step, which call the core. Unless ``check_as`` is 0, as for ``Step``, nothing
    # changes

    @property
    def is_growth_blocked(self) -> bool:
        """Return whether some live sequence waits for blocks."""
        return self._queue.is_growth_blocked

    def asking_headroom(self) -> int:
        """Return the headroom for the first call of the core. While somebody waits it is so large
        that the core refuses, and returns how many blocks are needed.
        """
        return self.num_headroom() if self._queue.is_idle else _PROBE

    def decide_admission(
        self, session: Session, message: cpb.Admit, num_needed: int, check_as: int
    ) -> MustWait | None:
        """Decide on an admission that the core has refused for now. Return None if it may be made
        now, with ``num_headroom``; otherwise why it has to wait, in the queue if it asks to.
        """
        waiting = session.queued
        is_only = waiting is None or waiting.is_of(message.sequence_id)
        key = _ADMISSION if is_only else _OTHER
        must_wait = self._ask(session, key, num_needed, wait=message.wait, check_as=check_as)
        if must_wait is not None and must_wait.sequence == key and not check_as:
            since_s = waiting.since_s if waiting is not None else self.pool.now_s
            session.queued = QueuedAdmission(key, message, session.numbers.last, since_s)
        return must_wait

    def decide_swap_in(
        self, session: Session, sequence_id: int, num_needed: int, check_as: int
    ) -> MustWait | None:
        """Decide on a swap-in that the core refused, as ``decide_admission`` does on an
        admission.
        """
        family = session.native.family_of(session.handle, sequence_id)
        if session.native.family_on_device(session.handle, family):
            return None
        must_wait = self._ask(session, family, num_needed, wait=True, check_as=check_as)
        is_queued = must_wait is not None and must_wait.sequence == family
        if is_queued and session.queued is None and not check_as:
            session.queued = QueuedAdmission(family, None, 0, self.pool.now_s)
        return must_wait

    def may_grow(
        self,
        session: Session,
        sequence_id: int,
        num_needed: int,
        *,
        num_awaited: int,
        fits: bool,
        check_as: int,
    ) -> bool:
        """Return whether a sequence may take so many blocks now, for which there is room if
        ``fits``. Otherwise it waits for ``num_awaited`` of them, unless it could have these now.
        """
        family, now_s = session.native.family_of(session.handle, sequence_id), self.pool.now_s
        if check_as:
            return self._queue.check_growth(session.id, family, num_needed, fits=fits)
        may_grow = self._queue.may_grow(
            session.id, family, num_needed, now_s, num_awaited=num_awaited, fits=fits
        )
        session.wanted.pop(family, None)
        if num_blocks := self._queue.num_awaited(session.id, family):
            session.wanted[family] = Wanted(sequence_id, num_blocks)
        return may_grow

    def stop_waiting(self, session: Session, sequence_ids: Container[int]) -> None:
        """Let these sequences wait no more for growth that was refused before: a later request has
        taken its place.
        """
        for family, wanted in [*session.wanted.items()]:
            if wanted.sequence_id in sequence_ids:
                self._queue.stop_growth(session.id, family, self.pool.now_s)
                del session.wanted[family]

    def apply(self, session: Session) -> None:
        """Report to the queue how the session's families of sequences changed in the core's last
        call. Not needed after calls that neither start nor end sequences nor move them to another
        tier.
        """
        for change, family in session.native.take_family_events(session.handle):
            if change == _native.FAMILY_STARTED:
                if session.queued is not None and session.queued.key == family:
                    session.queued = None
                self._queue.started(session.id, family, self.pool.now_s)
                continue
            session.wanted.pop(family, None)
            if change == _native.FAMILY_LEFT_DEVICE:
                self._queue.swapped_out(session.id, family)
            elif change == _native.FAMILY_ENDED:
                self._queue.ended(session.id, family)
            elif session.queued is not None and session.queued.key == family:
                self._withdraw(session)  # it waited to be swapped in

    def admitted(self, session: Session, message: cpb.Admit, num_cached: int) -> None:
        """Record that the core has admitted sequences. ``num_cached``: tokens that it found."""
        if session.queued is not None and session.queued.is_of(message.sequence_id):
            self._withdraw(session)
        if session.revoked:
            if message.sequence_id in session.revoked and not message.skip_prefix_lookup:
                statistics = self.pool.statistics
                statistics.reread_lookup_tokens += len(message.token_ids) // 4
                statistics.reread_hit_tokens += num_cached
            for sequence_id in (message.sequence_id, *forks_of(message)):
                session.revoked.pop(sequence_id, None)
        self.apply(session)

    def forget(self, session: Session, sequence_id: int) -> None:
        """Withdraw the admission that waits for the id, or forget that its sequence was cut."""
        if session.queued is not None and session.queued.names(sequence_id):
            self._withdraw(session)
        else:
            del session.revoked[sequence_id]

    # Grants and cuts outside of sessions' steps

    def serve(self) -> None:
        """Grant blocks to sequences that wait. Call it whenever blocks may have come back."""
        if self._queue.is_idle:
            return
        while (grant := self._queue.next_grant(self.pool.now_s)) is not None:
            if isinstance(grant, Growth):
                self._grow(self.sessions[grant.session], grant)
            elif not self._grant(self.sessions[grant.session], grant):
                return

    def tick(self) -> tuple[float, list[Session]]:
        """Cut sequences that are past their deadline to yield. Returns the seconds until the next
        call is due, and the sessions to end because their missing receipts keep blocks from others.
        """
        now_s, ended = self.pool.now_s, list[Session]()
        if self._queue.is_idle:
            return math.inf, ended
        for decision in self._queue.tick(now_s):
            session = self.sessions[decision.session]
            if isinstance(decision, Pressure):
                self.news.asked(
                    session,
                    session.native.family_on_device(session.handle, decision.sequence),
                    decision.num_blocks,
                    decision.deadline_s - now_s,
                )
            elif isinstance(decision, Cut):
                self._cut(session, decision)
            elif isinstance(decision, EndSession):
                ended.append(session)
        for session in self.sessions.values():
            waiting = session.queued
            if waiting is not None and waiting.lapses_s is not None and waiting.lapses_s <= now_s:
                self._withdraw(session)
        self.serve()
        return self._config.grace_s / 4, ended

    def check_integrity(self) -> None:
        """Check that the queue knows the families that hold device blocks. Raises AssertionError
        otherwise. The families of a busy session are compared when its request ends.
        """
        for session in self.sessions.values():
            if self._queue.is_busy(session.id):
                continue
            native, handle = session.native, session.handle
            ids = columns.read(INT64, native.sequence_ids(handle), "sequence_ids")
            families = {native.family_of(handle, i) for i in ids}
            on_device = {i for i in families if native.family_on_device(handle, i)}
            assert on_device == self._queue.live(session.id), f"session {session.id}: families"

    # Helpers

    def _withdraw(self, session: Session) -> None:
        """Remove a session's entry from the queue."""
        assert session.queued is not None
        self._queue.withdraw(session.id, session.queued.key)
        session.queued = None

    def _ask(
        self, session: Session, key: int, num_needed: int, *, wait: bool, check_as: int = 0
    ) -> MustWait | None:
        num_needed = min(num_needed, self.pool.num_blocks(_DEVICE))
        ask = self._queue.check_admission if check_as else self._queue.admit
        must_wait = ask(session.id, key, num_needed, self.pool.now_s, wait=wait)
        if must_wait is not None and must_wait.sequence != key:
            return MustWait(must_wait.reason)  # the session's place is for another sequence
        return must_wait

    def _grow(self, session: Session, grant: Growth) -> None:
        """Allocate the blocks that a blocked sequence asked for, ahead of its next append."""
        native, handle = session.native, session.handle
        wanted = session.wanted.pop(grant.sequence, None)
        if wanted is not None and native.has_sequence(handle, wanted.sequence_id):
            native.reserve(handle, wanted.sequence_id, grant.num_blocks)
            session.is_drafted = True

    def _grant(self, session: Session, grant: Admission) -> bool:
        """Admit the head of the queue; returns whether the next entry can be served now."""
        waiting = session.queued
        assert waiting is not None, "the queue has a place that its session does not know of"
        message = waiting.message
        if message is None:  # a swap-in: the session has to ask again, soon
            if waiting.lapses_s is None:
                waiting.lapses_s = self.pool.now_s + self._config.grace_s
            return False
        done = session.native.grant(
            session.handle,
            waiting.number,
            message.sequence_id,
            message.token_ids,
            message.fork_sequence_ids,
            message.num_compute_tokens if message.HasField("num_compute_tokens") else _ALL,
            message.max_total_tokens,
            message.skip_prefix_lookup,
            self.num_headroom(),
        )
        if len(done) == 3:
            self.admitted(session, message, done[0])
            self.news.granted(session, message, done[0], done[1])
            session.is_drafted = True
            self.pool.statistics.num_granted_admissions += 1
            self.pool.statistics.wait_s.add(self.pool.now_s - waiting.since_s)
            return True
        if done[1] in LATER:
            return self._ask(session, waiting.key, done[2], wait=True) is not None
        # The head of the queue cannot be admitted as things are: it leaves the queue.
        self._withdraw(session)
        by_quota = done[1] in _QUOTA
        reason = cpb.CUT_REASON_QUOTA if by_quota else cpb.CUT_REASON_IMPOSSIBLE
        self.news.cut(session, message.sequence_id, reason)
        return True

    def _cut(self, session: Session, cut: Cut) -> None:
        native, handle = session.native, session.handle
        session.wanted.pop(cut.sequence, None)
        on_device = native.family_on_device(handle, cut.sequence)
        for sequence_id in columns.read(INT64, on_device, "sequence_ids"):
            native.cut(handle, sequence_id)
            self.news.cut(session, sequence_id, _REASONS[cut.reason])
            self.pool.statistics.cut_sequences[cut.reason.name.lower()] += 1
        native.take_family_events(handle)  # for the queue it has ended already
        session.is_drafted = True


class PoolNews:
    """Collects the news of a pool's sessions; each session keeps its own for its next answer."""

    def __init__(self) -> None:
        self._unsent: set[Session] = set()

    def take_unsent(self) -> list[tuple[int, cpb.News]]:
        """Return the news that neither this method nor an answer has taken, with their sessions'
        ids. The sessions keep them.
        """
        unsent: list[tuple[int, cpb.News]] = []
        for session in self._unsent:
            if session.news is not None:
                # A request that runs now may be an abort, which voids what was granted before.
                session.news.as_of_number = session.numbers.answered
                unsent.append((session.id, session.news))
        self._unsent.clear()
        return unsent

    def take(self, session: Session) -> cpb.News | None:
        """Return a session's news for the answer to its last number, and clear them."""
        news, session.news = session.news, None
        if news is not None:
            news.as_of_number = session.numbers.last
        self._unsent.discard(session)
        return news

    def granted(
        self, session: Session, message: cpb.Admit, num_cached: int, num_blocks: int
    ) -> None:
        """Add to a session's news that its queued admission was granted."""
        news = self._of(session)
        news.granted_sequence_ids += columns.pack(INT64, [message.sequence_id])
        news.granted_num_cached_tokens += columns.pack(INT32, [num_cached])
        news.granted_num_blocks += columns.pack(INT32, [num_blocks])

    def drop_grants(self, session: Session) -> None:
        """Remove grants from a session's news, which after an abort are no longer true."""
        if session.news is not None:
            for field in (*_GRANTS, "as_of_number"):
                session.news.ClearField(field)
            if not session.news.ListFields():
                self.take(session)

    def cut(self, session: Session, sequence_id: int, reason: cpb.CutReason) -> None:
        """Add to a session's news that a sequence was cut, and remember that it was."""
        news = self._of(session)
        news.cut_sequence_ids += columns.pack(INT64, [sequence_id])
        news.cut_reasons += columns.pack(UINT8, [reason])
        session.revoked[sequence_id] = None
        session.revoked.move_to_end(sequence_id)
        while len(session.revoked) > _MAX_REVOKED:
            session.revoked.popitem(last=False)

    def asked(
        self, session: Session, sequence_ids: bytes, num_blocks: int, time_left_s: float
    ) -> None:
        """Add to a session's news a request to release these sequences' blocks. ``num_blocks``: how
        many it should release. ``time_left_s``: until a sequence is cut.
        """
        news = self._of(session)
        news.num_blocks_asked += num_blocks
        news.asked_sequence_ids += sequence_ids
        if not news.HasField("asked_within"):
            news.asked_within.FromNanoseconds(int(time_left_s * 1e9))

    def _of(self, session: Session) -> cpb.News:
        if session.news is None:
            session.news = cpb.News()
        self._unsent.add(session)
        return session.news


class DeviceBlocks:
    """Counts a pool's device blocks for the admission queue, as its ``PoolView``. What the queue
    calls a sequence is a family of the core: a sequence with its forks.
    """

    def __init__(self, pool: Pool, sessions: Mapping[int, Session]) -> None:
        self._pool = pool
        self._sessions = sessions

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks(_DEVICE)

    def num_obtainable(self, session: int) -> int:
        return self._pool.native.num_obtainable(self._handle(session), _DEVICE)

    def num_pending(self, session: int) -> int:
        return self._pool.native.num_pending(self._handle(session), _DEVICE)

    def num_held(self, session: int, sequence: int) -> int:
        return self._pool.native.family_held(self._handle(session), sequence)

    def num_held_by(self, session: int) -> int:
        native, handle = self._pool.native, self._handle(session)
        held = native.num_blocks_held(handle)  # of both tiers
        return native.num_device_blocks_held(handle) if held > self.num_blocks // 8 else held

    def last_progress(self, session: int, sequence: int) -> tuple[float, bool]:
        return self._pool.native.family_progress(self._handle(session), sequence)

    def retired_since(self, session: int) -> float | None:
        """Return when the session's oldest plan in flight was made, if blocks wait for receipts."""
        if not self._pool.native.num_own_retired(self._handle(session), _DEVICE):
            return None
        return self._sessions[session].oldest_plan_s()

    def _handle(self, session: int) -> int:
        return self._sessions[session].handle
