"""Who has to yield while others wait, and when."""

from __future__ import annotations

from control_plane.admission.decisions import (
    Admission,
    AdmissionConfig,
    Cut,
    Decision,
    EndSession,
    Growth,
    Pressure,
    Reason,
)
from control_plane.admission.victims import decide
from tests.helpers.planning.admission_rig import Rig

# Sequences here go on only where a test says so: in the tests of idleness.
CONFIG = AdmissionConfig(headroom=0.0, idle_s=1000.0)
WITH_IDLENESS = AdmissionConfig(headroom=0.0, idle_s=10.0)


def at(rig: Rig, now_s: float) -> list[Decision]:
    """The decisions of a tick at that time; what it cuts comes back at once."""
    rig.now_s = now_s
    decisions = rig.tick()
    for session in range(len(rig.held)):
        rig.receipt(session)
    return decisions


def seniority(rig: Rig) -> list[int]:
    """Sessions, the most senior first."""
    sessions = rig.queue._turns.sessions
    return sorted(sessions, key=lambda session: sessions[session].seniority)


def test_blocked_growth_makes_the_newest_sequence_of_the_most_junior_session_yield() -> None:
    rig = Rig(6, 3, CONFIG)
    for session, sequence in ((0, 1), (2, 1), (2, 2), (1, 1)):
        rig.ask(session, sequence, 1)
    rig.ask(1, 2, 2)
    assert not rig.grow(0, 1)
    assert at(rig, 0.9) == []
    assert at(rig, 1.0) == [Pressure(2, 2, 1, 2.0, Reason.GROWTH)]
    assert at(rig, 1.9) == []
    assert at(rig, 2.0) == [Cut(2, 2, Reason.GROWTH)]
    assert rig.serve() == [Growth(0, 1, 1)]


def test_the_same_session_is_not_cut_for_ever() -> None:
    """Its seniority is kept, and others' is lost."""
    rig = Rig(4, 3, CONFIG, (0, 1, 1), (1, 1, 2), (2, 1, 1))
    assert not rig.grow(0, 1)
    at(rig, 1.0)
    assert at(rig, 2.0) == [Cut(2, 1, Reason.GROWTH)]
    assert rig.serve() == [Growth(0, 1, 1)]
    rig.leave(1, 1)
    assert (rig.ask(1, 2, 1), rig.ask(2, 2, 1)) == (None, None)
    assert not rig.grow(0, 1)
    at(rig, 3.0)
    assert at(rig, 4.0) == [Cut(1, 2, Reason.GROWTH)]


def test_a_session_yields_to_its_own_growth() -> None:
    rig = Rig(4, 2, CONFIG, (0, 1, 2), (0, 2, 2))
    assert not rig.grow(0, 1)
    assert not rig.grow(0, 2)
    assert at(rig, 1.0) == [Pressure(0, 2, 2, 2.0, Reason.GROWTH)]
    assert at(rig, 2.0) == [Cut(0, 2, Reason.GROWTH)]
    assert rig.serve() == [Growth(0, 1, 1)]
    assert seniority(rig) == [0, 1]


def test_a_sequence_that_is_not_asked_any_more_leaves_like_any_other() -> None:
    """Else a session could stay senior by having been asked once."""
    rig = Rig(6, 3, CONFIG)
    for session, sequence, num_blocks in ((0, 1, 1), (1, 1, 1), (1, 2, 1), (2, 1, 3)):
        rig.ask(session, sequence, num_blocks)
    assert not rig.grow(0, 1, 2)
    assert at(rig, 1.0) == [Pressure(2, 1, 3, 2.0, Reason.GROWTH)]
    rig.end(1, 2)
    assert at(rig, 1.5) == [Pressure(1, 1, 1, 2.5, Reason.GROWTH)], "it is the most junior now"
    rig.end(2, 1)
    assert seniority(rig) == [0, 1, 2]


def test_senior_sessions_do_not_yield_to_juniors_growth() -> None:
    rig = Rig(4, 2, CONFIG, (1, 1, 2), (0, 1, 2))
    assert not rig.grow(1, 1)
    assert [at(rig, second) for second in (1.0, 2.0, 29.0)] == [[], [], []]


def test_nobody_yields_to_what_receipts_will_bring_back() -> None:
    rig = Rig(4, 3, CONFIG, (0, 1, 1), (1, 1, 2), (2, 1, 1))
    rig.end(2, 1)
    assert not rig.grow(0, 1)
    rig.now_s = 5.0
    assert rig.tick() == []
    rig.receipt(2)
    assert rig.serve() == [Growth(0, 1, 1)]


def test_only_as_many_are_asked_as_are_needed() -> None:
    rig = Rig(8, 5, CONFIG, (0, 1, 2))
    for session in (1, 2, 3):
        rig.ask(session, 1, 2)
    assert not rig.grow(0, 1, 3)
    asked = [decision.session for decision in at(rig, 1.0)]
    assert asked == [3, 2]


def test_pressure_lapses_with_the_need() -> None:
    rig = Rig(4, 2, CONFIG, (0, 1, 2), (1, 1, 1), (1, 2, 1))
    assert not rig.grow(0, 1)
    assert at(rig, 1.0) == [Pressure(1, 2, 1, 2.0, Reason.GROWTH)]
    rig.leave(1, 1)
    assert rig.serve() == [Growth(0, 1, 1)]
    assert at(rig, 2.0) == []
    assert not rig.grow(0, 1)
    assert at(rig, 3.0) == [Pressure(1, 2, 1, 4.0, Reason.GROWTH)]


def test_a_turn_ends_when_others_wait() -> None:
    rig = Rig(4, 2, CONFIG, (0, 1, 4))
    assert at(rig, 100.0) == [], "nobody waits"
    rig.ask(1, 1, 2)
    assert at(rig, 101.0) == [Pressure(0, 1, 4, 102.0, Reason.TURN)]
    assert at(rig, 102.0) == [Cut(0, 1, Reason.TURN)]
    assert rig.serve() == [Admission(1, 1, 2)]
    assert rig.ask(0, 2, 4) is not None
    assert at(rig, 132.0) == []
    assert at(rig, 132.5) == [Pressure(1, 1, 2, 133.5, Reason.TURN)]


def test_who_is_furthest_past_its_turn_yields_first() -> None:
    rig = Rig(6, 4, CONFIG)
    for session in (2, 0, 1):
        rig.now_s += 1.0
        rig.ask(session, 1, 2)
    rig.ask(3, 1, 3)
    assert [decision.session for decision in at(rig, 60.0)] == [2, 0]


def test_a_turn_does_not_end_for_the_same_sessions_admission() -> None:
    rig = Rig(4, 2, CONFIG, (0, 1, 4), (0, 2, 1))
    assert at(rig, 100.0) == []


def test_a_blocked_sequence_does_not_yield_to_the_queue() -> None:
    rig = Rig(4, 3, CONFIG, (1, 1, 2))
    rig.now_s = 25.0
    rig.ask(0, 1, 2)
    assert not rig.grow(1, 1)
    rig.ask(2, 1, 1)
    assert at(rig, 50.0) == []
    assert at(rig, 56.0) == [Pressure(0, 1, 2, 57.0, Reason.TURN)]


def test_who_is_cut_by_its_turn_goes_to_the_back_of_the_queue() -> None:
    rig = Rig(4, 3, CONFIG, (0, 1, 4), (0, 2, 4), (1, 1, 4), (2, 1, 4))
    at(rig, 31.0)
    assert at(rig, 32.0) == [Cut(0, 1, Reason.TURN)]
    assert rig.serve() == [Admission(1, 1, 4)]
    assert [w.session.id for w in rig.queue._entries.values()] == [2, 0]


def test_a_sequence_that_leaves_when_asked_counts_as_cut() -> None:
    rig = Rig(4, 2, CONFIG, (0, 1, 4), (0, 2, 4), (1, 1, 4))
    at(rig, 31.0)
    rig.leave(0, 1)
    assert rig.serve() == [Admission(1, 1, 4)], "its session went to the back"
    assert rig.queue._turns.sessions[0].num_doublings == 1


def test_an_idle_sequence_yields_long_before_its_turn_is_over() -> None:
    rig = Rig(4, 3, WITH_IDLENESS, (0, 1, 2), (1, 1, 2), (2, 1, 1))
    rig.now_s = 6.0
    rig.go_on(0, 1)
    assert at(rig, 10.0) == []
    assert at(rig, 10.5) == [Pressure(1, 1, 2, 11.5, Reason.IDLE)]
    assert at(rig, 11.5) == [Cut(1, 1, Reason.IDLE)]
    assert rig.serve() == [Admission(2, 1, 1)]
    rig.ask(1, 2, 2)
    assert at(rig, 16.0) == []
    assert at(rig, 16.5) == [Pressure(0, 1, 2, 17.5, Reason.IDLE)]


def test_nobody_is_idle_while_nobody_waits_or_a_plan_computes_it() -> None:
    rig = Rig(4, 2, WITH_IDLENESS, (0, 1, 4))
    assert at(rig, 20.0) == []
    rig.computed.add((0, 1))
    rig.ask(1, 1, 2)
    assert at(rig, 29.0) == []
    assert at(rig, 31.0) == [Pressure(0, 1, 4, 32.0, Reason.TURN)]


def test_a_grant_that_is_not_taken_up_is_idle() -> None:
    rig = Rig(4, 3, WITH_IDLENESS, (0, 1, 4), (1, 1, 4))
    rig.leave(0, 1)
    assert rig.serve() == [Admission(1, 1, 4)]
    rig.ask(2, 1, 4)
    assert at(rig, 10.5) == [Pressure(1, 1, 4, 11.5, Reason.IDLE)]


def test_an_idle_sequence_that_goes_on_when_asked_stays() -> None:
    rig = Rig(4, 2, WITH_IDLENESS, (0, 1, 4), (1, 1, 2))
    assert at(rig, 10.5) == [Pressure(0, 1, 4, 11.5, Reason.IDLE)]
    rig.go_on(0, 1)
    assert [at(rig, second) for second in (11.5, 12.0, 20.0)] == [[], [], []]
    assert at(rig, 22.0) == [Pressure(0, 1, 4, 23.0, Reason.IDLE)]


def test_a_blocked_sequence_is_not_idle() -> None:
    rig = Rig(4, 3, WITH_IDLENESS, (0, 1, 2), (1, 1, 2))
    rig.computed.add((0, 1))
    assert not rig.grow(1, 1)
    rig.ask(2, 1, 1)
    assert at(rig, 25.0) == []


def owed(rig: Rig, session: int) -> float:
    """For how long the session lets others pass from now on."""
    return max(0.0, rig.queue._turns.sessions[session].penalty_until_s - rig.now_s)


def test_an_idle_sequence_is_paid_for_by_what_it_held() -> None:
    for num_blocks, penalty_s in ((8, 30.0 * 3), (4, 30.0 * 3 / 2)):
        rig = Rig(8, 4, WITH_IDLENESS, (0, 1, num_blocks), (1, 1, 8), (2, 1, 8))
        at(rig, 10.5)
        assert at(rig, 11.5) == [Cut(0, 1, Reason.IDLE)]
        assert owed(rig, 0) == penalty_s, "a turn for each share of a third of the pool"


def test_only_the_first_turn_that_is_too_short_costs_nothing() -> None:
    rig = Rig(4, 2, CONFIG, (0, 1, 2), (0, 2, 2), (1, 1, 4))
    at(rig, 30.5)
    assert at(rig, 31.5) == [Cut(0, 1, Reason.TURN), Cut(0, 2, Reason.TURN)]
    assert owed(rig, 0) == 0.0
    assert rig.serve() == [Admission(1, 1, 4)]
    rig.leave(1, 1)
    rig.ask(0, 3, 4)
    rig.ask(1, 2, 4)
    at(rig, 92.0)
    assert at(rig, 93.0) == [Cut(0, 3, Reason.TURN)]
    assert owed(rig, 0) == 60.0 * 2, "it had the whole pool, and two share it"


def test_who_holds_much_has_a_shorter_turn_and_pays_for_the_first() -> None:
    """So a jump in growth takes most of the pool for some seconds, and only once."""
    rig = Rig(16, 9, CONFIG, (0, 1, 1))
    rig.grow(0, 1, 7)
    for session in range(1, 9):
        rig.ask(session, 1, 9)
    assert at(rig, 15.0) == [], "nine share the pool, and a quarter of it is much"
    assert at(rig, 15.5) == [Pressure(0, 1, 8, 16.5, Reason.TURN)]
    assert at(rig, 16.5) == [Cut(0, 1, Reason.TURN)]
    assert owed(rig, 0) == 30.0 * 8 * 9 / 16


def test_a_turn_without_progress_is_paid_for_at_once() -> None:
    """A plan in flight that never runs does not keep blocks for nothing."""
    rig = Rig(4, 2, WITH_IDLENESS, (0, 1, 4))
    rig.computed.add((0, 1))
    rig.ask(1, 1, 4)
    at(rig, 30.5)
    assert at(rig, 31.5) == [Cut(0, 1, Reason.TURN)]
    assert owed(rig, 0) == 30.0 * 2


def test_a_session_without_receipts_is_ended_when_others_wait() -> None:
    rig = Rig(4, 2, CONFIG, (0, 1, 4))
    rig.now_s = 1.0
    rig.end(0, 1)
    rig.now_s = 31.5
    assert rig.tick() == [], "nobody waits"
    rig.ask(1, 1, 2)
    rig.now_s = 32.5
    assert rig.tick() == [EndSession(0)]
    assert rig.serve() == [Admission(1, 1, 2)]


def test_a_session_has_time_for_its_receipts() -> None:
    rig = Rig(4, 2, CONFIG, (0, 1, 4))
    rig.end(0, 1)
    rig.ask(1, 1, 2)
    rig.now_s = 30.0
    assert rig.tick() == []


def test_headroom_is_asked_for_too() -> None:
    rig = Rig(100, 3, AdmissionConfig(headroom=0.1), (0, 1, 45), (1, 1, 45), (2, 1, 50))
    assert [decision.session for decision in at(rig, 40.0)] == [0, 1]


def test_an_empty_line_asks_nobody() -> None:
    rig = Rig(4, 1, CONFIG)
    assert decide(rig.queue._turns, {}, None, rig, CONFIG, 0, 0.0) == []
