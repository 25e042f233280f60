"""Shares the blocks of one pool: asks the queue, and applies its decisions to sessions.

    operation of a session ──► the core has room, nobody waits ──► done
                           └─► otherwise the queue is asked ──► done, LATER, or queued
    blocks came back, a timer ──► queued admissions and blocked growth are granted, sequences cut

While nobody waits and no growth is blocked, an operation costs no more than the core's own call.
Blocks that a blocked sequence is granted are in its table before it asks again. A swap-in keeps its
place while its session repeats it: the core moves blocks only within a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from kvplane_blocks import _native

from control_plane import checks
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
from control_plane.sessions.device_blocks import DeviceBlocks
from control_plane.sessions.families import Family
from control_plane.sessions.news import PoolNews
from control_plane.sessions.session import QueuedAdmission, Session
from kvplane.errors import SequenceExistsError
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

Failure = tuple[int, int, int, int, int]
Done = tuple[int, int, int]

_DEVICE: Final = tpb.TIER_DEVICE
_ON_DEVICE: Final = bytes([_DEVICE])
_LATER: Final = (_native.LATER, _native.LATER_HEADROOM)
_QUOTA: Final = (_native.LATER_QUOTA, _native.NEVER_QUOTA)
# A headroom larger than any pool: the core refuses, and says how many blocks are needed.
_PROBE: Final = 2**40
_ALL: Final = -1
# No admission has this key: for checks of new ones.
_NO_KEY: Final = 0
_REASONS: Final = {
    Reason.GROWTH: cpb.CUT_REASON_GROWTH,
    Reason.TURN: cpb.CUT_REASON_TURN,
    Reason.IDLE: cpb.CUT_REASON_IDLE,
}


class PoolAdmission:
    """The sessions of one pool, and their queue."""

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
        """Add a session."""
        self.sessions[session.id] = session
        self._queue.open(session.id)

    def close(self, session: Session) -> None:
        """Remove a session that ends."""
        self._queue.close(session.id)
        del self.sessions[session.id]
        self.news.take(session)

    def set_busy(self, session_id: int, is_busy: bool) -> None:
        """Set whether a request of the session is paused between two slices. Until it has ended the
        session is neither granted anything nor cut. Grants and cuts that fall due meanwhile are
        made when it ends, even if the session's next request begins at once.
        """
        if session_id in self.sessions:  # it may have ended
            self._queue.set_busy(session_id, is_busy)
            if not is_busy:
                self.tick()  # sessions that it finds to be ended, the next tick finds again

    def num_headroom(self) -> int:
        """Return how many device blocks admissions leave free."""
        return self._queue.num_headroom()

    # Operations of a step. ``check_as``: as for ``Step``, so unless it is 0 they change nothing

    def admit(
        self,
        session: Session,
        message: cpb.Admit,
        admit: Callable[[int], Done | Failure],
        check_as: int,
    ) -> tuple[Done | Failure, MustWait | None]:
        """Return the result of the core's ``admit(headroom)``, and why the admission has to wait.

        Raises SequenceExistsError when another admission that waits has the id.
        """
        waiting, queue = session.queued, self._queue
        is_again = waiting is not None and waiting.is_of(message.sequence_id)
        if waiting is not None and not is_again:
            _require_other_ids(waiting, message)
        done = admit(self.num_headroom() if queue.is_idle else _PROBE)
        if waiting is not None and is_again:
            key = waiting.key
        else:
            key = _NO_KEY if check_as else session.families.new_key()
        must_wait: MustWait | None = None
        if len(done) == 5 and done[1] in _LATER:
            must_wait = self._ask(session, key, done[2], wait=message.wait, check_as=check_as)
            if must_wait is None:
                done = admit(self.num_headroom())
        if check_as:
            return done, must_wait
        if len(done) == 3:
            self._started(session, key, message, done[0])
        elif must_wait is not None and must_wait.sequence == key:
            since_s = waiting.since_s if waiting is not None else self.pool.now_s
            session.queued = QueuedAdmission(key, message, session.numbers.last, since_s)
        return done, must_wait

    def append(
        self, session: Session, message: cpb.Append, check_as: int
    ) -> tuple[bytes, list[Failure] | None]:
        """Extend sequences; no growth passes an older one that waits for blocks."""
        native, handle = session.native, session.handle
        ids, firsts, slots = message.sequence_ids, message.first_positions, message.num_slots
        given = message.num_tokens, message.token_ids
        ahead = message.num_lookahead_slots
        num_obtainable = 0
        if not self._queue.is_growth_blocked:
            done = native.append_if_sure(handle, ids, firsts, slots, *given, ahead, check_as)
            if done is not None:
                return done
            num_obtainable = native.num_obtainable(handle, _DEVICE)
        growth = native.growth(handle, ids, firsts, slots, ahead, check_as)
        if sum(columns.read(INT32, growth, "growth")) > num_obtainable:
            return self._append_in_turn(session, message, check_as)
        return native.append(handle, ids, firsts, slots, *given, ahead, check_as)

    def fork(
        self, session: Session, message: cpb.Fork, check_as: int
    ) -> tuple[bytes, list[Failure] | None]:
        """Fork sequences. The ids of an admission that waits are not available."""
        native, handle, waiting = session.native, session.handle, session.queued
        ids = columns.read(INT64, message.sequence_ids, "sequence_ids")
        parents = columns.read(
            INT64, message.parent_sequence_ids, "parent_sequence_ids", length=len(ids)
        )
        items = [i for i, id_ in enumerate(ids) if waiting is None or not waiting.names(id_)]
        if len(items) == len(ids):
            done, failures = native.fork(
                handle, message.parent_sequence_ids, message.sequence_ids, check_as
            )
        else:
            column, refused = native.fork(
                handle,
                columns.pack(INT64, [parents[i] for i in items]),
                columns.pack(INT64, [ids[i] for i in items]),
                check_as,
            )
            num_blocks = dict(zip(items, columns.read(INT32, column, "num_blocks"), strict=True))
            done = columns.pack(INT32, [num_blocks.get(i, 0) for i in range(len(ids))])
            failures = [(items[item], code, a, b, c) for item, code, a, b, c in refused or ()]
            taken = set(range(len(ids))).difference(items)
            failures = sorted([*failures, *((i, _native.EXISTS, ids[i], 0, 0) for i in taken)])
        if check_as:
            return done, failures
        not_done = {failure[0] for failure in failures or ()}
        for item, sequence_id in enumerate(ids):
            if item not in not_done:
                session.families.fork(parents[item], sequence_id)
                session.revoked.pop(sequence_id, None)
        return done, failures

    def freed(
        self,
        session: Session,
        sequence_ids: bytes,
        failures: list[Failure] | None,
        check_as: int,
    ) -> list[Failure] | None:
        """Remove sequences that the core freed, all but those in ``failures``; return the failures
        that remain. Freeing an admission that waits withdraws it; freeing a cut sequence succeeds.
        """
        ids = columns.read(INT64, sequence_ids, "sequence_ids")
        refused = {failure[0]: failure for failure in failures or ()}
        for item, sequence_id in enumerate(ids):
            if item not in refused:
                if not check_as:
                    self._gone(session, session.families.remove(sequence_id))
            elif refused[item][1] == _native.NOT_FOUND and session.may_forget(sequence_id):
                if not check_as:
                    self._forget(session, sequence_id)
                del refused[item]
        return list(refused.values()) or None

    def swapped_out(self, session: Session, sequence_ids: bytes) -> None:
        """Record that sequences were swapped out."""
        for sequence_id in columns.read(INT64, sequence_ids, "sequence_ids"):
            family = session.families.of(sequence_id)
            family.swapped.add(sequence_id)
            self._settle(session, family)

    def swap_in(
        self,
        session: Session,
        sequence_ids: bytes,
        swap: Callable[[int], int | Failure],
        check_as: int,
    ) -> tuple[int | Failure, MustWait | None]:
        """Let ``swap(headroom)`` bring sequences in, which the queue treats as an admission."""
        queue, headroom = self._queue, self.num_headroom()
        done = swap(headroom if queue.is_idle else _PROBE)
        must_wait: MustWait | None = None
        ids = columns.read(INT64, sequence_ids, "sequence_ids")
        if not isinstance(done, int) and done[1] in _LATER:
            family = session.families.of(ids[0])
            if not family.is_live:
                must_wait = self._ask(session, family.key, done[2], wait=True, check_as=check_as)
            if must_wait is None:
                done = swap(headroom)
            elif must_wait.sequence == family.key and not (session.queued or check_as):
                session.queued = QueuedAdmission(family.key, None, 0, self.pool.now_s)
        if isinstance(done, int) and not check_as:
            for sequence_id in ids:
                family = session.families.of(sequence_id)
                family.swapped.discard(sequence_id)
                self._settle(session, family)
        return done, must_wait

    def aborted(self, session: Session, sequences: cpb.SequenceStates) -> None:
        """Record the tiers of sequences after an abort, which may have changed them. ``sequences``:
        all of the session, in the abort's answer, which so takes the place of news of grants.
        """
        self.news.drop_grants(session)
        on_host: set[int] = set()
        if sequences.tiers.strip(_ON_DEVICE):
            ids = columns.read(INT64, sequences.sequence_ids, "sequence_ids")
            tiers = columns.read(UINT8, sequences.tiers, "tiers")
            on_host = {i for i, tier in zip(ids, tiers, strict=True) if tier != _DEVICE}
        for family in session.families.all():
            family.swapped = family.members & on_host if on_host else set()
            self._settle(session, family)

    # Grants and cuts outside of sessions' steps

    def serve(self) -> None:
        """Grant blocks to those that wait. Call it whenever blocks may have come back."""
        if self._queue.is_idle:
            return
        while (grant := self._queue.next_grant(self.pool.now_s)) is not None:
            if isinstance(grant, Growth):
                self._grow(self.sessions[grant.session], grant)
            elif not self._grant(self.sessions[grant.session], grant):
                return

    def tick(self) -> tuple[float, list[Session]]:
        """Cut sequences that have to yield. Returns the seconds until the next call is due, and the
        sessions to end because their missing receipts keep blocks from others.
        """
        now_s, ended = self.pool.now_s, list[Session]()
        if self._queue.is_idle:
            return math.inf, ended
        for decision in self._queue.tick(now_s):
            session = self.sessions[decision.session]
            if isinstance(decision, Pressure):
                family = session.families.by_key(decision.sequence)
                self.news.asked(
                    session,
                    sorted(family.members - family.swapped),
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
                self._queue.withdraw(session.id, waiting.key)
                session.queued = None
        self.serve()
        return self._config.grace_s / 4, ended

    # Helpers

    def _ask(
        self, session: Session, key: int, num_needed: int, *, wait: bool, check_as: int = 0
    ) -> MustWait | None:
        num_needed = min(num_needed, self.pool.num_blocks(_DEVICE))
        ask = self._queue.check_admission if check_as else self._queue.admit
        must_wait = ask(session.id, key, num_needed, self.pool.now_s, wait=wait)
        if must_wait is not None and must_wait.sequence != key:
            return MustWait(must_wait.reason)  # the session's place is for another sequence
        return must_wait

    def _started(self, session: Session, key: int, message: cpb.Admit, num_cached: int) -> None:
        """Record sequences admitted together. ``key``: a new one of the session's families, or that
        of the admission that waited.
        """
        ids = [message.sequence_id]
        if message.fork_sequence_ids:
            ids += columns.read(INT64, message.fork_sequence_ids, "fork_sequence_ids")
        num_looked_up = 0
        if session.revoked and not message.skip_prefix_lookup:
            num_looked_up = len(message.token_ids) // 4
        session.families.add(key, ids)
        if session.queued is not None and session.queued.key == key:
            session.queued = None
        was_cut = ids[0] in session.revoked
        for sequence_id in ids if session.revoked else ():
            session.revoked.pop(sequence_id, None)
        if was_cut and num_looked_up:
            statistics = self.pool.statistics
            statistics.reread_lookup_tokens += num_looked_up
            statistics.reread_hit_tokens += num_cached
        self._queue.started(session.id, key, self.pool.now_s)

    def _append_in_turn(
        self, session: Session, message: cpb.Append, check_as: int
    ) -> tuple[bytes, list[Failure] | None]:
        """Extend sequences item by item: no growth passes an older one that is blocked."""
        native, handle = session.native, session.handle
        num = columns.count(INT64, message.sequence_ids)
        given = columns.read(INT32, message.num_tokens, "num_tokens", length=num)
        # Each access to a message's bytes copies all of them.
        all_ids, all_tokens = message.sequence_ids, message.token_ids
        columns_of_4 = (
            message.first_positions,
            message.num_slots,
            message.num_tokens,
            message.num_lookahead_slots,
        )
        checks.token_columns(given, all_tokens)
        failures: list[Failure] = []
        done = bytearray()
        begin = 0
        for item in range(num):
            end = begin + 4 * given[item]
            ids = all_ids[8 * item : 8 * item + 8]
            firsts, slots, tokens, ahead = (
                column[4 * item : 4 * item + 4] for column in columns_of_4
            )
            growth = native.growth(handle, ids, firsts, slots, ahead, check_as)
            (num_needed,) = columns.read(INT32, growth, "growth")
            (sequence_id,) = columns.read(INT64, ids, "sequence_ids")
            if num_needed and not self._may_grow(session, sequence_id, num_needed, check_as):
                num_obtainable = native.num_obtainable(handle, _DEVICE)
                failures.append((item, _native.LATER, num_needed, num_obtainable, _DEVICE))
                done += bytes(4)
            else:
                token_ids = all_tokens[begin:end]
                one, refused = native.append(
                    handle, ids, firsts, slots, tokens, token_ids, ahead, check_as
                )
                failures += [(item, *failure[1:]) for failure in refused or ()]
                done += one
            begin = end
        return bytes(done), failures or None

    def _may_grow(self, session: Session, sequence_id: int, num_needed: int, check_as: int) -> bool:
        """Return whether the queue lets a sequence grow now. If not it waits, unless checked."""
        session_id, key = session.id, session.families.of(sequence_id).key
        if check_as:
            return self._queue.check_growth(session_id, key, num_needed)
        if self._queue.may_grow(session_id, key, num_needed, self.pool.now_s):
            session.wanted.pop(key, None)
            return True
        session.wanted[key] = sequence_id
        return False

    def _grow(self, session: Session, grant: Growth) -> None:
        """Give a blocked sequence the blocks that it asked for, ahead of its next append."""
        native, handle = session.native, session.handle
        sequence_id = session.wanted.pop(grant.sequence, 0)
        if native.has_sequence(handle, sequence_id):
            native.reserve(handle, sequence_id, grant.num_blocks)
            session.is_drafted = True

    def _grant(self, session: Session, grant: Admission) -> bool:
        """Admit the head of the queue; returns whether the next can be served now."""
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
            self._started(session, waiting.key, message, done[0])
            self.news.granted(session, message, done[0], done[1])
            session.is_drafted = True
            self.pool.statistics.num_granted_admissions += 1
            self.pool.statistics.wait_s.add(self.pool.now_s - waiting.since_s)
            return True
        if done[1] in _LATER:
            return self._ask(session, waiting.key, done[2], wait=True) is not None
        # The head of the queue cannot be admitted as things are: it leaves the queue.
        self._queue.withdraw(session.id, waiting.key)
        session.queued = None
        by_quota = done[1] in _QUOTA
        reason = cpb.CUT_REASON_QUOTA if by_quota else cpb.CUT_REASON_IMPOSSIBLE
        self.news.cut(session, message.sequence_id, reason)
        return True

    def _cut(self, session: Session, cut: Cut) -> None:
        family = session.families.by_key(cut.sequence)
        family.is_live = False
        session.wanted.pop(family.key, None)
        for sequence_id in sorted(family.members - family.swapped):
            session.native.cut(session.handle, sequence_id)
            session.families.remove(sequence_id)
            self.news.cut(session, sequence_id, _REASONS[cut.reason])
            self.pool.statistics.cut_sequences[cut.reason.name.lower()] += 1
        session.is_drafted = True

    def _gone(self, session: Session, family: Family) -> None:
        """Settle a family of which a sequence was freed."""
        if family.members:
            self._settle(session, family)
            return
        if family.is_live:
            family.is_live = False
            session.wanted.pop(family.key, None)
            self._queue.ended(session.id, family.key)
        if session.queued is not None and session.queued.key == family.key:
            self._queue.withdraw(session.id, family.key)
            session.queued = None

    def _settle(self, session: Session, family: Family) -> None:
        """Let the queue know whether the family holds device blocks."""
        if family.is_on_device == family.is_live:
            return
        family.is_live = family.is_on_device
        session_id = session.id
        if not family.is_live:
            session.wanted.pop(family.key, None)
            self._queue.swapped_out(session_id, family.key)
            return
        if session.queued is not None and session.queued.key == family.key:
            session.queued = None
        self._queue.started(session_id, family.key, self.pool.now_s)

    def _forget(self, session: Session, sequence_id: int) -> None:
        """Withdraw the admission that waits for the id, or forget that its sequence was cut."""
        waiting = session.queued
        if waiting is not None and waiting.names(sequence_id):
            self._queue.withdraw(session.id, waiting.key)
            session.queued = None
        else:
            del session.revoked[sequence_id]


def _require_other_ids(waiting: QueuedAdmission, message: cpb.Admit) -> None:
    """Raise SequenceExistsError if the message has an id of the admission that waits."""
    forks = columns.read(INT64, message.fork_sequence_ids, "fork_sequence_ids")
    for i, sequence_id in enumerate([message.sequence_id, *forks]):
        if waiting.names(sequence_id):
            field = f"fork_sequence_ids[{i - 1}]" if i else "sequence_id"
            raise SequenceExistsError(f"sequence {sequence_id} waits to be admitted", field=field)
