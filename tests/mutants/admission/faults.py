"""Faults of the queue: each leaves out one of its rules, or a part of it.

Each takes pytest's monkeypatch and plants itself for one test. ``STARVING`` have a case of the
checker that shows them, by its name; ``OTHERS`` are shown by a test of one behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from control_plane.admission import victims
from control_plane.admission.decisions import Admission, Growth, MustWait, Reason
from control_plane.admission.queue import AdmissionQueue
from control_plane.admission.turns import Claim, Claimant, Turns


def the_head_is_passed(patch: pytest.MonkeyPatch) -> None:
    """1: whoever finds room is admitted, also when others stand in front."""
    patch.setattr(AdmissionQueue, "_is_first", lambda self, session, now_s: True)


def polling_keeps_a_position(patch: pytest.MonkeyPatch) -> None:
    """1: who asks without waiting stands in the queue too."""

    def admit(self: AdmissionQueue, *args: Any, wait: bool) -> MustWait | None:
        return original(self, *args, wait=True)

    original = AdmissionQueue.admit
    patch.setattr(AdmissionQueue, "admit", admit)


def asking_again_loses_the_position(patch: pytest.MonkeyPatch) -> None:
    """1: a session that asks again goes to the back."""

    def admit(
        self: AdmissionQueue, session: int, sequence: int, *args: Any, **kwargs: Any
    ) -> MustWait | None:
        self.withdraw(session, sequence)
        return original(self, session, sequence, *args, **kwargs)

    original = AdmissionQueue.admit
    patch.setattr(AdmissionQueue, "admit", admit)


def a_session_has_many_places(patch: pytest.MonkeyPatch) -> None:
    """1: another sequence of a session takes its place over."""

    def admit(
        self: AdmissionQueue, session: int, sequence: int, *args: Any, **kwargs: Any
    ) -> MustWait | None:
        if session in self._entries:
            self._entries[session].sequence = sequence  # type: ignore[misc]
        return original(self, session, sequence, *args, **kwargs)

    original = AdmissionQueue.admit
    patch.setattr(AdmissionQueue, "admit", admit)


def admissions_are_not_pushed(patch: pytest.MonkeyPatch) -> None:
    """2: who waits has to ask again."""
    _grant_only(patch, Growth)


def growth_is_not_pushed(patch: pytest.MonkeyPatch) -> None:
    """2: growth that could go on is not told."""
    _grant_only(patch, Admission)


def _grant_only(patch: pytest.MonkeyPatch, kind: type) -> None:
    def next_grant(self: AdmissionQueue, now_s: float) -> Growth | Admission | None:
        oldest = self._turns.oldest_blocked()
        if oldest is not None and kind is Admission:
            return None
        grant = original(self, now_s)
        return grant if isinstance(grant, kind) else None

    original = AdmissionQueue.next_grant
    patch.setattr(AdmissionQueue, "next_grant", next_grant)


def admissions_come_before_growth(patch: pytest.MonkeyPatch) -> None:
    """3: an admission is made whenever there is room for it."""

    def admit(
        self: AdmissionQueue, session: int, sequence: int, num: int, now_s: float, *, wait: bool
    ) -> MustWait | None:
        must_wait = original(self, session, sequence, num, now_s, wait=wait)
        return (
            None if self._is_first(session, now_s) and self._has_room(session, num) else must_wait
        )

    original = AdmissionQueue.admit
    patch.setattr(AdmissionQueue, "admit", admit)


def younger_growth_passes(patch: pytest.MonkeyPatch) -> None:
    """3: growth takes what there is, whoever waits for more."""

    def may_grow(self: AdmissionQueue, session: int, sequence: int, num: int, now_s: float) -> bool:
        if num <= self._pool.num_obtainable(session):
            self._turns.unblock(self._turns.sessions[session].sequences[sequence], now_s)
            return True
        return original(self, session, sequence, num, now_s)

    original = AdmissionQueue.may_grow
    patch.setattr(AdmissionQueue, "may_grow", may_grow)


def impossible_growth_waits(patch: pytest.MonkeyPatch) -> None:
    """3: growth beyond the pool is remembered like any other."""

    def may_grow(self: AdmissionQueue, session: int, sequence: int, num: int, now_s: float) -> bool:
        may = original(self, session, sequence, num, now_s)
        if not may:
            self._turns.block(self._turns.sessions[session].sequences[sequence], num, now_s)
        return may

    original = AdmissionQueue.may_grow
    patch.setattr(AdmissionQueue, "may_grow", may_grow)


def nobody_yields_to_growth(patch: pytest.MonkeyPatch) -> None:
    """4: growth waits until sequences end, or their turns do."""
    patch.setattr(victims, "_juniors", lambda turns, blocked: iter(()))


def nobody_yields_to_its_own_growth(patch: pytest.MonkeyPatch) -> None:
    """4: the sequences of one session wait for each other."""
    _juniors_of(patch, own=False)


def only_to_its_own_growth(patch: pytest.MonkeyPatch) -> None:
    """4: the sequences of two sessions wait for each other."""
    _juniors_of(patch, own=True)


def _juniors_of(patch: pytest.MonkeyPatch, *, own: bool) -> None:
    def juniors(turns: Turns, blocked: list[Claim]) -> Iterator[tuple[Claim, Reason]]:
        waits = min(blocked, key=lambda s: s.session.seniority, default=None)
        found = original(turns, blocked)
        return ((s, r) for s, r in found if waits and (s.session is waits.session) is own)

    original = victims._juniors
    patch.setattr(victims, "_juniors", juniors)


def growth_cuts_the_senior(patch: pytest.MonkeyPatch) -> None:
    """4: the most senior session is the first to yield."""

    def juniors(turns: Turns, blocked: list[Claim]) -> Iterator[tuple[Claim, Reason]]:
        return iter([(s, r) for s, r in original(turns, blocked)][::-1])

    original = victims._juniors
    patch.setattr(victims, "_juniors", juniors)


def seniority_is_lost_with_every_cut(patch: pytest.MonkeyPatch) -> None:
    """4: who was cut for others is cut again."""
    _seniority(patch, lost=lambda reason: True)


def seniority_is_never_lost(patch: pytest.MonkeyPatch) -> None:
    """4: the session that came first is never cut for growth."""
    _seniority(patch, lost=lambda reason: False)


def who_was_asked_once_leaves_for_free(patch: pytest.MonkeyPatch) -> None:
    """4, 8: a sequence that leaves counts as cut though it is not asked to any more."""

    def leave(self: AdmissionQueue, session: int, sequence: int, *, done: bool) -> None:
        leaving = self._turns.sessions[session].sequences[sequence]
        if leaving.deadline_s is not None:
            leaving.reason = leaving.reason or Reason.GROWTH
        original(self, session, sequence, done=done)

    original = AdmissionQueue._leave
    patch.setattr(AdmissionQueue, "_leave", leave)


def _seniority(patch: pytest.MonkeyPatch, *, lost: Any) -> None:
    def end(self: Turns, sequence: Claim, *, reason: Any, done: bool) -> None:
        session = sequence.session
        before = session.seniority
        original(self, sequence, reason=reason, done=done)
        session.seniority = before
        if lost(reason):
            self._make_junior(session)

    original = Turns.end
    patch.setattr(Turns, "end", end)


def turns_never_end(patch: pytest.MonkeyPatch) -> None:
    """5: nobody yields to the queue."""
    patch.setattr(victims, "_past_turn", lambda *args: iter(()))


def the_newest_turn_ends_first(patch: pytest.MonkeyPatch) -> None:
    """5: who is past its turn yields in the wrong order."""

    def past_turn(*args: Any) -> Iterator[tuple[Claim, Reason]]:
        return iter(list(original(*args))[::-1])

    original = victims._past_turn
    patch.setattr(victims, "_past_turn", past_turn)


def who_is_cut_keeps_its_position(patch: pytest.MonkeyPatch) -> None:
    """5: the session of a cut turn does not go to the back of the queue."""

    def leave(self: AdmissionQueue, session: int, sequence: int, *, done: bool) -> None:
        order = list(self._entries)
        original(self, session, sequence, done=done)
        for other in order:
            self._entries.move_to_end(other)

    original = AdmissionQueue._leave
    patch.setattr(AdmissionQueue, "_leave", leave)


def idle_ones_keep_their_turn(patch: pytest.MonkeyPatch) -> None:
    """5: who does nothing yields no sooner than others."""
    patch.setattr(victims, "_is_idle", lambda *args: False)


def what_is_computed_is_idle(patch: pytest.MonkeyPatch) -> None:
    """5: a plan in flight counts for nothing."""

    def is_idle(pool: Any, sequence: Claim, idle_s: float, now_s: float) -> bool:
        progress_s, _ = pool.last_progress(sequence.session.id, sequence.id)
        return bool(progress_s + idle_s < now_s)

    patch.setattr(victims, "_is_idle", is_idle)


def the_blocked_are_idle(patch: pytest.MonkeyPatch) -> None:
    """5, 7: who waits for blocks is cut because it does not go on."""

    def past_turn(turns: Turns, *args: Any) -> Iterator[tuple[Claim, Reason]]:
        yield from original(turns, *args)
        for sequence in turns.blocked():
            if victims._is_idle(args[2], sequence, *args[3:]):
                yield sequence, Reason.IDLE

    original = victims._past_turn
    patch.setattr(victims, "_past_turn", past_turn)


def turns_are_not_doubled(patch: pytest.MonkeyPatch) -> None:
    """6: each turn is as long as the first."""

    def init(self: Turns, turn_s: float, max_doublings: int) -> None:
        original(self, turn_s, 0)

    original = Turns.__init__
    patch.setattr(Turns, "__init__", init)


def long_turns_are_free(patch: pytest.MonkeyPatch) -> None:
    """6: nothing is owed for them."""
    patch.setattr(victims, "_penalty_s", lambda *args: 0.0)


def blocks_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    """6: what is owed does not depend on what was held."""

    def penalty_s(turns: Turns, sequence: Claim, *args: Any) -> float:
        return turns.length_s(sequence) if original(turns, sequence, *args) else 0.0

    original = victims._penalty_s
    patch.setattr(victims, "_penalty_s", penalty_s)


def the_first_long_turn_costs_too(patch: pytest.MonkeyPatch) -> None:
    """6: a sequence that is longer than a turn makes its session pay."""

    def penalty_s(
        turns: Turns, sequence: Claim, reason: Reason, line: Any, pool: Any, idle_s: float,
        now_s: float,
    ) -> float:  # fmt: skip
        return original(turns, sequence, reason, line, pool, -1e9, now_s)

    original = victims._penalty_s
    patch.setattr(victims, "_penalty_s", penalty_s)


def nothing_is_too_much(patch: pytest.MonkeyPatch) -> None:
    """5: who holds most of the pool has as long a turn as others."""
    patch.setattr(victims, "_over_fair_share", lambda *args: 0.0)


def what_is_owed_does_not_add_up(patch: pytest.MonkeyPatch) -> None:
    """6: a session pays for one of its sequences."""

    def end(self: Turns, sequence: Claim, *, reason: Any, done: bool) -> None:
        sequence.session.penalty_until_s = 0.0
        original(self, sequence, reason=reason, done=done)

    original = Turns.end
    patch.setattr(Turns, "end", end)


def a_long_turn_is_one_of_many(patch: pytest.MonkeyPatch) -> None:
    """6: a session has several sequences with doubled turns."""
    patch.setattr(Claimant, "is_passed_over", lambda self, now_s: self.penalty_until_s > now_s)


def nobody_is_chosen(patch: pytest.MonkeyPatch) -> None:
    """6: if all have to let others pass, nobody is the first."""

    def head(self: AdmissionQueue, now_s: float) -> Any:
        waiting = self._entries.values()
        return next((w for w in waiting if not w.session.is_passed_over(now_s)), None)

    patch.setattr(AdmissionQueue, "_find_head", head)


def idleness_doubles(patch: pytest.MonkeyPatch) -> None:
    """6: who does nothing gets longer turns by it."""

    def end(self: Turns, sequence: Claim, *, reason: Any, done: bool) -> None:
        reason = Reason.TURN if reason is Reason.IDLE else reason
        original(self, sequence, reason=reason, done=done)

    original = Turns.end
    patch.setattr(Turns, "end", end)


def turns_stay_long(patch: pytest.MonkeyPatch) -> None:
    """6: a sequence that ends does not make them short again."""

    def end(self: Turns, sequence: Claim, *, reason: Any, done: bool) -> None:
        original(self, sequence, reason=reason, done=False)

    original = Turns.end
    patch.setattr(Turns, "end", end)


def yielding_makes_turns_short(patch: pytest.MonkeyPatch) -> None:
    """6, 8: a sequence that leaves when asked counts as one that ended."""

    def end(self: Turns, sequence: Claim, *, reason: Any, done: bool) -> None:
        original(self, sequence, reason=reason, done=done)
        if done:
            sequence.session.num_doublings = 0

    original = Turns.end
    patch.setattr(Turns, "end", end)


def clocks_never_stand(patch: pytest.MonkeyPatch) -> None:
    """7: a turn runs also while its sequence cannot go on."""

    def unblock(self: Turns, sequence: Claim, now_s: float) -> None:
        sequence.blocked_s = now_s
        original(self, sequence, now_s)

    def past_turn(turns: Turns, *args: Any) -> Iterator[tuple[Claim, Reason]]:
        blocked = {sequence: sequence.num_blocked for sequence in turns.blocked()}
        for sequence in blocked:
            sequence.num_blocked = 0
        found = list(past(turns, *args))
        for sequence, num in blocked.items():
            sequence.num_blocked = num
        return iter(found)

    original, past = Turns.unblock, victims._past_turn
    patch.setattr(Turns, "unblock", unblock)
    patch.setattr(victims, "_past_turn", past_turn)


def cuts_are_not_announced(patch: pytest.MonkeyPatch) -> None:
    """8: a sequence is cut as soon as it has to yield."""

    def ask(pool: Any, sequence: Claim, reason: Reason, grace_s: float, now_s: float) -> Any:
        sequence.deadline_s = now_s
        return original(pool, sequence, reason, grace_s, now_s)

    original = victims._ask
    patch.setattr(victims, "_ask", ask)


def deadlines_are_put_off(patch: pytest.MonkeyPatch) -> None:
    """8: who is asked again gets more time."""

    def ask(pool: Any, sequence: Claim, reason: Reason, grace_s: float, now_s: float) -> Any:
        sequence.deadline_s = None
        return original(pool, sequence, reason, grace_s, now_s)

    original = victims._ask
    patch.setattr(victims, "_ask", ask)


def more_yield_than_needed(patch: pytest.MonkeyPatch) -> None:
    """8: all that may be asked are asked."""
    patch.setattr(victims, "_num_lacking", lambda *args: (1 << 40, 1 << 40))


def receipts_may_be_missing(patch: pytest.MonkeyPatch) -> None:
    """9: no session is ended."""
    patch.setattr(victims, "_without_receipts", lambda *args: iter(()))


def sessions_are_ended_for_nobody(patch: pytest.MonkeyPatch) -> None:
    """9: a session is ended though nobody else waits."""

    def without(turns: Turns, waiting: set[Claimant], *args: Any) -> Iterator[Any]:
        nobody = Claimant(-1, 0)
        return original(turns, waiting | {nobody}, *args)

    original = victims._without_receipts
    patch.setattr(victims, "_without_receipts", without)


def places_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A session is not told how many stand in front of it."""
    patch.setattr(AdmissionQueue, "_position", lambda self, waiting: 1)


def pending_blocks_count_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """Sequences yield although receipts will bring enough."""

    def num_lacking(turns: Turns, head: Any, pool: Any, headroom: int) -> tuple[int, int]:
        class NothingPending:
            num_obtainable = staticmethod(pool.num_obtainable)
            num_pending = staticmethod(lambda session: 0)

        return original(turns, head, NothingPending, headroom)  # type: ignore[arg-type]

    original = victims._num_lacking
    patch.setattr(victims, "_num_lacking", num_lacking)


STARVING = {
    the_head_is_passed: "big honest and hostile",
    asking_again_loses_the_position: "big honest and hostile",
    admissions_are_not_pushed: "big honest and hostile",
    growth_is_not_pushed: "big honest and hostile",
    admissions_come_before_growth: "big honest and hostile",
    nobody_yields_to_growth: "two, of the whole pool",
    nobody_yields_to_its_own_growth: "one, with two of over half",
    only_to_its_own_growth: "two, of the whole pool",
    seniority_is_never_lost: "two, of the whole pool",
    turns_never_end: "honest and hostile",
    turns_are_not_doubled: "two, of the whole pool",
    yielding_makes_turns_short: "two that yield",
    deadlines_are_put_off: "two, of the whole pool",
    receipts_may_be_missing: "big honest and hostile",
    clocks_never_stand: "honest and hostile with two",
    who_was_asked_once_leaves_for_free: "honest and hostile with two",
}
OTHERS = (
    clocks_never_stand,
    polling_keeps_a_position,
    a_session_has_many_places,
    younger_growth_passes,
    impossible_growth_waits,
    growth_cuts_the_senior,
    seniority_is_lost_with_every_cut,
    who_was_asked_once_leaves_for_free,
    the_newest_turn_ends_first,
    who_is_cut_keeps_its_position,
    idle_ones_keep_their_turn,
    what_is_computed_is_idle,
    the_blocked_are_idle,
    long_turns_are_free,
    blocks_cost_nothing,
    the_first_long_turn_costs_too,
    nothing_is_too_much,
    what_is_owed_does_not_add_up,
    a_long_turn_is_one_of_many,
    nobody_is_chosen,
    idleness_doubles,
    turns_stay_long,
    cuts_are_not_announced,
    more_yield_than_needed,
    sessions_are_ended_for_nobody,
    places_are_not_counted,
    pending_blocks_count_for_nothing,
)
