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
from control_plane.sessions.member import Member, QueuedAdmission
from control_plane.sessions.session import Session
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
        self.members: dict[int, Member] = {}
        self.with_news: set[int] = set()  # sessions whose news were not taken yet
        self._pool = pool
        self._config = config
        self._queue = AdmissionQueue(DeviceBlocks(pool, self.members), config)

    # Sessions

    def open(self, session: Session) -> Member:
        """Add a session."""
        member = self.members[session.id] = Member(session, self.with_news)
        self._queue.open(session.id)
        return member

    def close(self, session_id: int) -> None:
        """Remove a session that ends."""
        self._queue.close(session_id)
        del self.members[session_id]
        self.with_news.discard(session_id)

    def set_busy(self, session_id: int, is_busy: bool) -> None:
        """Set whether a request of the session is paused between two slices. Until it has ended the
        session is neither granted anything nor cut. Grants and cuts that fall due meanwhile are
        made when it ends, even if the session's next request begins at once.
        """
        if session_id in self.members:  # it may have ended
            self._queue.set_busy(session_id, is_busy)
            if not is_busy:
                self.tick()  # sessions that it finds to be ended, the next tick finds again

    def take_notices(self) -> list[tuple[int, cpb.News]]:
        """Return the sessions whose news were not taken yet, and the news."""
        notices = [(i, self.members[i].news) for i in self.with_news]
        self.with_news.clear()
        return [(i, news) for i, news in notices if news is not None]

    def num_headroom(self) -> int:
        """Return how many device blocks admissions leave free."""
        return self._queue.num_headroom()

    # Operations of a step. ``check_as``: as for ``Step``, so unless it is 0 they change nothing

    def admit(
        self,
        member: Member,
        message: cpb.Admit,
        admit: Callable[[int], Done | Failure],
        check_as: int,
    ) -> tuple[Done | Failure, MustWait | None]:
        """Return the result of the core's ``admit(headroom)``, and why the admission has to wait.

        Raises SequenceExistsError when another admission that waits has the id.
        """
        waiting, queue = member.queued, self._queue
        is_again = waiting is not None and waiting.is_of(message.sequence_id)
        if waiting is not None and not is_again:
            _require_other_ids(waiting, message)
        done = admit(self.num_headroom() if queue.is_idle else _PROBE)
        if waiting is not None and is_again:
            key = waiting.key
        else:
            key = _NO_KEY if check_as else member.families.new_key()
        must_wait: MustWait | None = None
        if len(done) == 5 and done[1] in _LATER:
            must_wait = self._ask(member, key, done[2], wait=message.wait, check_as=check_as)
            if must_wait is None:
                done = admit(self.num_headroom())
        if check_as:
            return done, must_wait
        if len(done) == 3:
            self._started(member, key, message, done[0])
        elif must_wait is not None and must_wait.sequence == key:
            since_s = waiting.since_s if waiting is not None else self._pool.now_s
            member.queued = QueuedAdmission(key, message, member.session.numbers.last, since_s)
        return done, must_wait

    def append(
        self, member: Member, message: cpb.Append, check_as: int
    ) -> tuple[bytes, list[Failure] | None]:
        """Extend sequences; no growth passes an older one that waits for blocks."""
        native, handle = member.session.native, member.session.handle
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
            return self._append_in_turn(member, message, check_as)
        return native.append(handle, ids, firsts, slots, *given, ahead, check_as)

    def fork(
        self, member: Member, message: cpb.Fork, check_as: int
    ) -> tuple[bytes, list[Failure] | None]:
        """Fork sequences. The ids of an admission that waits are not available."""
        native, handle, waiting = member.session.native, member.session.handle, member.queued
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
                member.families.fork(parents[item], sequence_id)
                member.revoked.pop(sequence_id, None)
        return done, failures

    def freed(
        self,
        member: Member,
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
                    self._gone(member, member.families.remove(sequence_id))
            elif refused[item][1] == _native.NOT_FOUND and member.may_forget(sequence_id):
                if not check_as:
                    self._forget(member, sequence_id)
                del refused[item]
        return list(refused.values()) or None

    def swapped_out(self, member: Member, sequence_ids: bytes) -> None:
        """Record that sequences were swapped out."""
        for sequence_id in columns.read(INT64, sequence_ids, "sequence_ids"):
            family = member.families.of(sequence_id)
            family.swapped.add(sequence_id)
            self._settle(member, family)

    def swap_in(
        self,
        member: Member,
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
            family = member.families.of(ids[0])
            if not family.is_live:
                must_wait = self._ask(member, family.key, done[2], wait=True, check_as=check_as)
            if must_wait is None:
                done = swap(headroom)
            elif must_wait.sequence == family.key and not (member.queued or check_as):
                member.queued = QueuedAdmission(family.key, None, 0, self._pool.now_s)
        if isinstance(done, int) and not check_as:
            for sequence_id in ids:
                family = member.families.of(sequence_id)
                family.swapped.discard(sequence_id)
                self._settle(member, family)
        return done, must_wait

    def aborted(self, member: Member, sequences: cpb.SequenceStates) -> None:
        """Record the tiers of sequences after an abort, which may have changed them. ``sequences``:
        all of the session, in the abort's answer, which so takes the place of news of grants.
        """
        member.drop_grants()
        on_host: set[int] = set()
        if sequences.tiers.strip(_ON_DEVICE):
            ids = columns.read(INT64, sequences.sequence_ids, "sequence_ids")
            tiers = columns.read(UINT8, sequences.tiers, "tiers")
            on_host = {i for i, tier in zip(ids, tiers, strict=True) if tier != _DEVICE}
        for family in member.families.all():
            family.swapped = family.members & on_host if on_host else set()
            self._settle(member, family)

    # Grants and cuts outside of sessions' steps

    def serve(self) -> None:
        """Grant blocks to those that wait. Call it whenever blocks may have come back."""
        if self._queue.is_idle:
            return
        while (grant := self._queue.next_grant(self._pool.now_s)) is not None:
            if isinstance(grant, Growth):
                self._grow(self.members[grant.session], grant)
            elif not self._grant(self.members[grant.session], grant):
                return

    def tick(self) -> tuple[float, list[Session]]:
        """Cut sequences that have to yield. Returns the seconds until the next call is due, and the
        sessions to end because their missing receipts keep blocks from others.
        """
        now_s, ended = self._pool.now_s, list[Session]()
        if self._queue.is_idle:
            return math.inf, ended
        for decision in self._queue.tick(now_s):
            member = self.members[decision.session]
            if isinstance(decision, Pressure):
                family = member.families.by_key(decision.sequence)
                member.notify_pressure(family, decision.num_blocks, decision.deadline_s - now_s)
            elif isinstance(decision, Cut):
                self._cut(member, decision)
            elif isinstance(decision, EndSession):
                ended.append(member.session)
        for member in self.members.values():
            waiting = member.queued
            if waiting is not None and waiting.lapses_s is not None and waiting.lapses_s <= now_s:
                self._queue.withdraw(member.session.id, waiting.key)
                member.queued = None
        self.serve()
        return self._config.grace_s / 4, ended

    # Helpers

    def _ask(
        self, member: Member, key: int, num_needed: int, *, wait: bool, check_as: int = 0
    ) -> MustWait | None:
        num_needed = min(num_needed, self._pool.num_blocks(_DEVICE))
        ask = self._queue.check_admission if check_as else self._queue.admit
        must_wait = ask(member.session.id, key, num_needed, self._pool.now_s, wait=wait)
        if must_wait is not None and must_wait.sequence != key:
            return MustWait(must_wait.reason)  # the session's place is for another sequence
        return must_wait

    def _started(self, member: Member, key: int, message: cpb.Admit, num_cached: int) -> None:
        """Record sequences admitted together. ``key``: a new one of the member's families, or that
        of the admission that waited.
        """
        ids = [message.sequence_id]
        if message.fork_sequence_ids:
            ids += columns.read(INT64, message.fork_sequence_ids, "fork_sequence_ids")
        num_looked_up = 0
        if member.revoked and not message.skip_prefix_lookup:
            num_looked_up = len(message.token_ids) // 4
        member.families.add(key, ids)
        if member.queued is not None and member.queued.key == key:
            member.queued = None
        was_cut = ids[0] in member.revoked
        for sequence_id in ids if member.revoked else ():
            member.revoked.pop(sequence_id, None)
        if was_cut and num_looked_up:
            statistics = self._pool.statistics
            statistics.reread_lookup_tokens += num_looked_up
            statistics.reread_hit_tokens += num_cached
        self._queue.started(member.session.id, key, self._pool.now_s)

    def _append_in_turn(
        self, member: Member, message: cpb.Append, check_as: int
    ) -> tuple[bytes, list[Failure] | None]:
        """Extend sequences item by item: no growth passes an older one that is blocked."""
        native, handle = member.session.native, member.session.handle
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
            if num_needed and not self._may_grow(member, sequence_id, num_needed, check_as):
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

    def _may_grow(self, member: Member, sequence_id: int, num_needed: int, check_as: int) -> bool:
        """Return whether the queue lets a sequence grow now. If not it waits, unless checked."""
        session_id, key = member.session.id, member.families.of(sequence_id).key
        if check_as:
            return self._queue.check_growth(session_id, key, num_needed)
        if self._queue.may_grow(session_id, key, num_needed, self._pool.now_s):
            member.wanted.pop(key, None)
            return True
        member.wanted[key] = sequence_id
        return False

    def _grow(self, member: Member, grant: Growth) -> None:
        """Give a blocked sequence the blocks that it asked for, ahead of its next append."""
        native, handle = member.session.native, member.session.handle
        sequence_id = member.wanted.pop(grant.sequence, 0)
        if native.has_sequence(handle, sequence_id):
            native.reserve(handle, sequence_id, grant.num_blocks)
            member.is_drafted = True

    def _grant(self, member: Member, grant: Admission) -> bool:
        """Admit the head of the queue; returns whether the next can be served now."""
        session, waiting = member.session, member.queued
        assert waiting is not None, "the queue has a place that its session does not know of"
        message = waiting.message
        if message is None:  # a swap-in: the session has to ask again, soon
            if waiting.lapses_s is None:
                waiting.lapses_s = self._pool.now_s + self._config.grace_s
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
            self._started(member, waiting.key, message, done[0])
            member.notify_granted(message, done[0], done[1])
            member.is_drafted = True
            self._pool.statistics.num_granted_admissions += 1
            self._pool.statistics.wait_s.add(self._pool.now_s - waiting.since_s)
            return True
        if done[1] in _LATER:
            return self._ask(member, waiting.key, done[2], wait=True) is not None
        # The head of the queue cannot be admitted as things are: it leaves the queue.
        self._queue.withdraw(session.id, waiting.key)
        member.queued = None
        by_quota = done[1] in _QUOTA
        reason = cpb.CUT_REASON_QUOTA if by_quota else cpb.CUT_REASON_IMPOSSIBLE
        member.notify_cut(message.sequence_id, reason)
        return True

    def _cut(self, member: Member, cut: Cut) -> None:
        session, family = member.session, member.families.by_key(cut.sequence)
        family.is_live = False
        member.wanted.pop(family.key, None)
        for sequence_id in sorted(family.members - family.swapped):
            session.native.cut(session.handle, sequence_id)
            member.families.remove(sequence_id)
            member.notify_cut(sequence_id, _REASONS[cut.reason])
            self._pool.statistics.cut_sequences[cut.reason.name.lower()] += 1
        member.is_drafted = True

    def _gone(self, member: Member, family: Family) -> None:
        """Settle a family of which a sequence was freed."""
        if family.members:
            self._settle(member, family)
            return
        if family.is_live:
            family.is_live = False
            member.wanted.pop(family.key, None)
            self._queue.ended(member.session.id, family.key)
        if member.queued is not None and member.queued.key == family.key:
            self._queue.withdraw(member.session.id, family.key)
            member.queued = None

    def _settle(self, member: Member, family: Family) -> None:
        """Let the queue know whether the family holds device blocks."""
        if family.is_on_device == family.is_live:
            return
        family.is_live = family.is_on_device
        session_id = member.session.id
        if not family.is_live:
            member.wanted.pop(family.key, None)
            self._queue.swapped_out(session_id, family.key)
            return
        if member.queued is not None and member.queued.key == family.key:
            member.queued = None
        self._queue.started(session_id, family.key, self._pool.now_s)

    def _forget(self, member: Member, sequence_id: int) -> None:
        """Withdraw the admission that waits for the id, or forget that its sequence was cut."""
        waiting = member.queued
        if waiting is not None and waiting.names(sequence_id):
            self._queue.withdraw(member.session.id, waiting.key)
            member.queued = None
        else:
            del member.revoked[sequence_id]


def _require_other_ids(waiting: QueuedAdmission, message: cpb.Admit) -> None:
    """Raise SequenceExistsError if the message has an id of the admission that waits."""
    forks = columns.read(INT64, message.fork_sequence_ids, "fork_sequence_ids")
    for i, sequence_id in enumerate([message.sequence_id, *forks]):
        if waiting.names(sequence_id):
            field = f"fork_sequence_ids[{i - 1}]" if i else "sequence_id"
            raise SequenceExistsError(f"sequence {sequence_id} waits to be admitted", field=field)
