"""Chooses the sequences that yield to those that wait: rules 4, 5 and 8 to 10 of the queue."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Final

from control_plane.admission.decisions import (
    AdmissionConfig,
    Cut,
    Decision,
    EndSession,
    PoolView,
    Pressure,
    Reason,
)
from control_plane.admission.turns import Claim, Claimant, Turns


class QueueEntry:
    """An admission that has waited in the queue since ``since_s``."""

    __slots__ = ("is_chosen", "num_needed", "sequence", "session", "since_s", "ticket")

    def __init__(
        self, session: Claimant, sequence: int, num_needed: int, since_s: float, ticket: int
    ) -> None:
        self.session: Final = session
        self.sequence: Final = sequence
        self.num_needed = num_needed
        self.since_s = since_s
        self.ticket = ticket  # the order of the queue; the head has the lowest
        self.is_chosen = False  # chosen although everyone in the queue owed a pass


def decide(
    turns: Turns,
    queue: Mapping[int, QueueEntry],
    head: QueueEntry | None,
    pool: PoolView,
    config: AdmissionConfig,
    num_headroom: int,
    now_s: float,
) -> list[Decision]:
    """Return which sequences are asked to yield or are cut now, and which sessions end."""
    long_ago_s = now_s - config.grace_s
    blocked = [s for s in turns.blocked() if s.blocked_s <= long_ago_s]
    waiting = {s.session for s in blocked}
    waiting.update(entry.session for entry in queue.values() if entry.since_s <= long_ago_s)

    num_for_growth, num_for_all = _num_lacking(turns, head, pool, num_headroom)
    chosen: dict[Claim, Reason] = {}
    num_found = 0
    for num_lacking, candidates in (
        (num_for_growth, _juniors(turns, blocked)),
        (num_for_all, _past_turn(turns, queue, waiting, pool, config.idle_s, now_s)),
    ):
        for sequence, reason in candidates:
            if num_found >= num_lacking:
                break
            if sequence not in chosen:
                chosen[sequence] = reason
                num_found += _num_held(pool, sequence) + sequence.num_blocked

    for sequence in turns.asked - chosen.keys():
        sequence.reason = None
        due_s = sequence.deadline_s
        if due_s is None or num_for_all <= 0 or due_s + config.grace_s < now_s:
            sequence.deadline_s = None
            turns.asked.remove(sequence)
    turns.asked.update(chosen)
    decisions = [_ask(pool, s, reason, config.grace_s, now_s) for s, reason in chosen.items()]
    for sequence, reason in chosen.items():
        sequence.penalty_s = _penalty_s(turns, sequence, reason, queue, pool, config.idle_s, now_s)
    overdue = _without_receipts(turns, waiting, pool, now_s - config.receipt_deadline_s)
    return [d for d in decisions if d is not None] + list(overdue)


def _num_lacking(
    turns: Turns, head: QueueEntry | None, pool: PoolView, num_headroom: int
) -> tuple[int, int]:
    """Return how many blocks are lacking for blocked growth, and for that and the queue's head."""
    oldest = turns.oldest_blocked()
    if oldest is not None:
        first = oldest.session.id
    elif head is not None:
        first = head.session.id
    else:
        return 0, 0
    num_coming = pool.num_obtainable(first) + pool.num_pending(first)
    num_for_growth = turns.num_blocked - num_coming
    num_for_head = head.num_needed + num_headroom if head is not None else 0
    return num_for_growth, num_for_growth + num_for_head


def _juniors(turns: Turns, blocked: list[Claim]) -> Iterator[tuple[Claim, Reason]]:
    """Yield the sequences that give way to blocked growth: the newest of the most junior session
    first, up to the oldest blocked sequence of the most senior session that is blocked.
    """
    if not blocked:
        return
    senior = min({s.session for s in blocked}, key=lambda session: session.seniority)
    last = min((s for s in blocked if s.session is senior), key=lambda s: s.rank)
    sessions = sorted(turns.sessions.values(), key=lambda session: -session.seniority)
    for session in sessions:
        for sequence in reversed(session.sequences.values()):
            if sequence is last:
                return
            yield sequence, Reason.GROWTH


def _past_turn(
    turns: Turns,
    queue: Mapping[int, QueueEntry],
    waiting: set[Claimant],
    pool: PoolView,
    idle_s: float,
    now_s: float,
) -> Iterator[tuple[Claim, Reason]]:
    """Yield sequences past their turn, or idle, while another session waits; furthest first."""
    if not waiting:
        return
    past = []
    for session in turns.sessions.values():
        much = max(1.0, _over_fair_share(session, queue, pool))
        for sequence in session.sequences.values():
            ends_s = sequence.ends_s - turns.length_s(sequence) * (1 - 1 / much)
            is_past = ends_s < now_s
            if sequence.num_blocked or not (is_past or _is_idle(pool, sequence, idle_s, now_s)):
                continue
            reason = Reason.TURN if is_past else Reason.IDLE
            past.append((min(ends_s, sequence.idles_s), sequence.rank, sequence, reason))
    heapq.heapify(past)  # a few of them are enough
    while past:
        _, _, sequence, reason = heapq.heappop(past)
        if _other_waits(waiting, sequence.session):
            yield sequence, reason


def _over_fair_share(session: Claimant, queue: Mapping[int, QueueEntry], pool: PoolView) -> float:
    """Return how many times its allowance a session holds. The allowance is a quarter of the pool,
    or twice the session's fair share if that is more.
    """
    most = max(0.25, 2 / _num_sharing(session, queue))
    return pool.num_held_by(session.id) / (most * pool.num_blocks)


def _num_sharing(session: Claimant, queue: Mapping[int, QueueEntry]) -> int:
    """Count the sessions that share the pool: this one, and those that wait."""
    return len(queue) + (session.id not in queue)


def _is_idle(pool: PoolView, sequence: Claim, idle_s: float, now_s: float) -> bool:
    """Return whether the sequence has made no progress for ``idle_s``. Asks the pool only once in
    ``idle_s`` while it makes progress.
    """
    if sequence.idles_s < now_s:
        progress_s, is_computed = pool.last_progress(sequence.session.id, sequence.id)
        sequence.idles_s = (now_s if is_computed else progress_s) + idle_s
    return sequence.idles_s < now_s


def _penalty_s(
    turns: Turns,
    sequence: Claim,
    reason: Reason,
    queue: Mapping[int, QueueEntry],
    pool: PoolView,
    idle_s: float,
    now_s: float,
) -> float:
    """Return for how long the session of a cut sequence lets others pass: a turn for each fair
    share of the pool that the sequence held. A first turn too short for a sequence that makes
    progress costs nothing, unless its session holds much.
    """
    if reason is Reason.GROWTH:
        return 0.0
    session = sequence.session
    if not session.num_doublings and _over_fair_share(session, queue, pool) <= 1:
        progress_s, _ = pool.last_progress(session.id, sequence.id)
        if progress_s + idle_s >= now_s:
            return 0.0
    num_shares = _num_held(pool, sequence) * _num_sharing(session, queue) / pool.num_blocks
    return turns.length_s(sequence) * num_shares


def _without_receipts(
    turns: Turns, waiting: set[Claimant], pool: PoolView, long_ago_s: float
) -> Iterator[EndSession]:
    for session in turns.sessions.values():
        since_s = pool.retired_since(session.id)
        if since_s is not None and since_s < long_ago_s and _other_waits(waiting, session):
            yield EndSession(session.id)


def _other_waits(waiting: set[Claimant], session: Claimant) -> bool:
    return len(waiting) > (session in waiting)


def _ask(
    pool: PoolView, sequence: Claim, reason: Reason, grace_s: float, now_s: float
) -> Decision | None:
    session, id_ = sequence.session.id, sequence.id
    sequence.reason = reason
    if sequence.deadline_s is None:
        sequence.deadline_s = now_s + grace_s
        return Pressure(session, id_, _num_held(pool, sequence), sequence.deadline_s, reason)
    is_due = sequence.deadline_s <= now_s and not sequence.session.is_busy
    return Cut(session, id_, reason) if is_due else None


def _num_held(pool: PoolView, sequence: Claim) -> int:
    return pool.num_held(sequence.session.id, sequence.id)
