"""Turns: their clocks, their lengths, and seniority."""

from __future__ import annotations

from control_plane.admission.decisions import Reason
from control_plane.admission.turns import Claim, Turns


def opened(num_sessions: int = 2) -> Turns:
    turns = Turns(turn_s=10.0, max_doublings=3)
    for session in range(num_sessions):
        turns.open(session)
    return turns


def started(turns: Turns, session: int, sequence: int, now_s: float) -> Claim:
    turns.start(session, sequence, now_s)
    return turns.sessions[session].sequences[sequence]


def past_its_turn(turns: Turns, sequence: Claim, penalty_s: float = 0.0) -> None:
    """It goes at second 10, because its turn is over."""
    sequence.deadline_s, sequence.penalty_s = 10.0, penalty_s
    turns.end(sequence, reason=Reason.TURN, done=False)


def order(turns: Turns) -> list[int]:
    """Sessions, the most senior first."""
    return sorted(turns.sessions, key=lambda session: turns.sessions[session].seniority)


def test_a_clock_stands_while_the_sequence_is_blocked() -> None:
    turns = opened()
    first, second = started(turns, 0, 1, 0.0), started(turns, 0, 2, 0.0)
    turns.block(first, 1, 4.0)
    turns.block(first, 2, 5.0)
    turns.unblock(first, 9.0)
    turns.unblock(first, 12.0)
    assert 15.0 - first.ends_s == 0.0
    assert 15.0 - second.ends_s == 5.0, "that of its session's other one runs"


def test_a_sequence_that_left_is_not_blocked_any_more() -> None:
    turns = opened()
    turns.block(started(turns, 0, 1, 0.0), 1, 0.0)
    turns.end(turns.sessions[0].sequences[1], reason=None, done=True)
    assert (turns.num_live, turns.num_blocked, turns.oldest_blocked()) == (0, 0, None)


def test_a_cut_turn_doubles_the_next_and_not_those_that_run() -> None:
    turns = opened()
    first, second = started(turns, 0, 1, 0.0), started(turns, 0, 2, 0.0)
    past_its_turn(turns, first)
    assert 10.0 - second.ends_s == 0.0
    past_its_turn(turns, second)
    third = started(turns, 0, 3, 10.0)
    assert 30.0 - third.ends_s == 0.0, "two that ran together double it once"
    for doubled_s in (40.0, 80.0, 80.0):
        past_its_turn(turns, third)
        third = started(turns, 0, 3, 0.0)
        assert doubled_s - third.ends_s == 0.0


def test_what_is_owed_for_two_sequences_adds_up() -> None:
    turns = opened()
    first, second = started(turns, 0, 1, 0.0), started(turns, 0, 2, 0.0)
    past_its_turn(turns, first, penalty_s=5.0)
    past_its_turn(turns, second, penalty_s=7.0)
    assert turns.sessions[0].penalty_until_s == 22.0
    started(turns, 0, 3, 15.0)
    assert not turns.sessions[1].is_passed_over(15.0)
    assert turns.sessions[0].penalty_until_s == 0.0, "nobody was there to be let pass"


def test_an_idle_sequence_doubles_no_turn() -> None:
    turns = opened()
    sequence = started(turns, 0, 1, 0.0)
    sequence.deadline_s, sequence.penalty_s = 10.0, 5.0
    turns.end(sequence, reason=Reason.IDLE, done=False)
    session = turns.sessions[0]
    assert (session.num_doublings, session.penalty_until_s) == (0, 15.0)
    assert order(turns) == [1, 0]


def test_turns_are_short_again_when_a_sequence_ends_that_was_not_made_to_go() -> None:
    for reason, done, num_doublings in (
        (None, True, 0),
        (None, False, 1),
        (Reason.GROWTH, True, 1),
        (Reason.TURN, True, 2),
    ):
        turns = opened()
        past_its_turn(turns, started(turns, 0, 1, 0.0))
        second = started(turns, 0, 2, 0.0)
        second.deadline_s = 10.0
        turns.end(second, reason=reason, done=done)
        assert turns.sessions[0].num_doublings == num_doublings, (reason, done)


def test_whatever_leaves_costs_seniority_except_for_growth() -> None:
    for reason, expected in (
        (None, [1, 2, 0]),
        (Reason.TURN, [1, 2, 0]),
        (Reason.GROWTH, [0, 1, 2]),
    ):
        turns = opened(3)
        sequence = started(turns, 0, 1, 0.0)
        sequence.deadline_s = 10.0
        turns.end(sequence, reason=reason, done=False)
        assert order(turns) == expected, reason


def test_growth_is_served_by_age_however_often_it_is_blocked() -> None:
    turns = opened()
    first, second = started(turns, 0, 1, 0.0), started(turns, 1, 1, 0.0)
    turns.block(second, 3, 0.0)
    for _ in range(100):
        turns.block(first, 1, 0.0)
        assert turns.oldest_blocked() is first
        turns.unblock(first, 0.0)
    assert turns.oldest_blocked() is second
    for _ in range(100):
        turns.block(first, 1, 0.0)
        turns.unblock(first, 0.0)
    assert len(turns._heap) <= 2
    turns.close(1)
    assert (turns.oldest_blocked(), turns.num_blocked) == (None, 0)
