"""The queue: who is admitted, who may grow, and in which order."""

from __future__ import annotations

from control_plane.admission.decisions import (
    Admission,
    AdmissionConfig,
    Growth,
    MustWait,
    Reason,
)
from control_plane.admission.queue import AdmissionQueue
from tests.helpers.planning.admission_rig import Rig

CONFIG = AdmissionConfig(headroom=0.0)


def full_pool(num_blocks: int = 10, num_sessions: int = 4) -> Rig:
    """Session 0 holds the whole pool, by sequence 1."""
    rig = Rig(num_blocks, num_sessions, CONFIG)
    assert rig.ask(0, 1, num_blocks) is None
    return rig


def test_nobody_passes_the_head() -> None:
    rig = Rig(10, 3, CONFIG, (0, 1, 8))
    assert rig.ask(1, 1, 5) == MustWait(Reason.BLOCKS, 1, 1)
    assert rig.ask(2, 1, 1) == MustWait(Reason.QUEUE, 2, 1), "there is room, but not for the head"
    assert rig.serve() == []
    rig.leave(0, 1)
    assert rig.serve() == [Admission(1, 1, 5), Admission(2, 1, 1)]


def test_who_asks_without_waiting_gets_no_place_and_passes_nobody() -> None:
    rig = full_pool()
    assert rig.ask(1, 1, 5) == MustWait(Reason.BLOCKS, 1, 1)
    rig.leave(0, 1)
    for _ in range(3):
        assert rig.ask(2, 1, 1, wait=False) == MustWait(Reason.QUEUE)
    assert rig.serve() == [Admission(1, 1, 5)]
    assert rig.ask(2, 1, 1, wait=False) is None


def test_asking_again_keeps_the_place_and_updates_the_number() -> None:
    rig = full_pool()
    rig.ask(1, 1, 5)
    rig.ask(2, 1, 3)
    assert rig.ask(1, 1, 7, wait=False) == MustWait(Reason.BLOCKS, 1, 1)
    rig.leave(0, 1)
    assert rig.serve() == [Admission(1, 1, 7), Admission(2, 1, 3)]


def test_a_session_has_one_position() -> None:
    rig = full_pool()
    rig.ask(1, 1, 5)
    assert rig.ask(1, 2, 1) == MustWait(Reason.QUEUE, 1, 1)
    assert rig.ask(2, 1, 1) == MustWait(Reason.QUEUE, 2, 1)


def test_a_withdrawn_admission_loses_its_position() -> None:
    rig = full_pool()
    rig.ask(1, 1, 5)
    rig.ask(2, 1, 4)
    rig.queue.withdraw(1, 2)
    assert rig.ask(2, 1, 4) == MustWait(Reason.QUEUE, 2, 1), "another sequence was withdrawn"
    rig.queue.withdraw(1, 1)
    assert rig.ask(2, 1, 4) == MustWait(Reason.BLOCKS, 1, 1)


def test_a_closed_session_leaves_the_line_and_its_growth_is_forgotten() -> None:
    rig = Rig(10, 3, CONFIG, (0, 1, 6), (1, 1, 4))
    assert not rig.grow(1, 1)
    rig.queue.close(1)
    rig.held[1].clear()
    assert rig.ask(2, 1, 9) == MustWait(Reason.BLOCKS, 1, 1)
    rig.queue.close(2)
    assert rig.ask(0, 2, 4) is None


def test_a_grant_that_needs_more_by_now_stays_the_head() -> None:
    rig = Rig(10, 3, CONFIG, (0, 1, 5), (0, 2, 5), (1, 1, 2), (2, 1, 1))
    rig.leave(0, 2)
    assert rig.queue.next_grant(0.0) == Admission(1, 1, 2)
    assert rig.ask(1, 1, 6) == MustWait(Reason.BLOCKS, 1, 1), "what it had found cached is gone"
    assert rig.serve() == []
    assert rig.ask(1, 1, 5) is None


def test_no_younger_growth_passes_and_an_older_one_does() -> None:
    rig = Rig(9, 4, CONFIG)
    for session in range(3):
        rig.ask(session, 1, 2)
    assert not rig.grow(1, 1, 4)
    assert not rig.grow(2, 1, 1), "there is room, but an older sequence waits for more"
    assert rig.grow(0, 1, 1)
    rig.leave(0, 1)
    assert rig.serve() == [Growth(1, 1, 4), Growth(2, 1, 1)]


def test_younger_growth_does_not_take_free_blocks_for_its_own_retired_ones() -> None:
    rig = Rig(8, 2, CONFIG, (1, 1, 4), (0, 1, 1), (0, 2, 1))
    rig.end(0, 2)
    assert not rig.grow(1, 1, 3), "two are free, and one is retired for session 0"
    assert not rig.grow(0, 1, 1), "it would get one of those two"
    rig.receipt(0)
    assert rig.serve() == [Growth(1, 1, 3)]


def test_a_session_grows_into_its_own_retired_blocks_before_their_receipt() -> None:
    rig = Rig(4, 1, CONFIG, (0, 1, 2), (0, 2, 2))
    rig.end(0, 2)
    assert rig.grow(0, 1, 2)


def test_growth_asked_for_again_replaces_what_was_asked_for() -> None:
    rig = Rig(6, 2, CONFIG, (0, 1, 3), (1, 1, 3))
    assert not rig.grow(0, 1, 3)
    assert not rig.grow(0, 1, 1)
    rig.leave(1, 1)
    assert rig.serve() == [Growth(0, 1, 1)]
    assert rig.serve() == []


def test_growth_beyond_the_pool_stops_nobody() -> None:
    rig = full_pool()
    assert not rig.grow(0, 1, 1)
    assert rig.ask(1, 1, 1) == MustWait(Reason.BLOCKS, 1, 1), "growth would be named"


def test_growth_of_a_sequence_that_ended_is_forgotten() -> None:
    rig = Rig(4, 2, CONFIG, (0, 1, 2), (1, 1, 2))
    assert not rig.grow(0, 1, 1)
    rig.leave(0, 1)
    assert rig.ask(0, 2, 2) is None


def test_admissions_leave_headroom_unless_the_pool_is_empty() -> None:
    rig = Rig(20, 2, AdmissionConfig(headroom=0.1))
    assert rig.ask(0, 1, 19) is None
    rig.leave(0, 1)
    assert rig.ask(0, 2, 10) is None
    assert rig.ask(1, 1, 9) == MustWait(Reason.BLOCKS, 1, 1)
    assert rig.ask(1, 1, 8) is None
    assert rig.grow(1, 1, 2), "headroom is for growth"


def test_a_session_that_has_to_lets_others_pass_for_a_time() -> None:
    rig = full_pool()
    for session in (1, 2, 3):
        rig.ask(session, 1, 10)
    rig.queue._turns.sessions[1].penalty_until_s = 2.0
    rig.leave(0, 1)
    assert rig.serve() == [Admission(2, 1, 10)]
    rig.ask(2, 2, 10)
    rig.now_s = 2.0
    rig.leave(2, 1)
    assert rig.serve() == [Admission(3, 1, 10)], "it stands behind the third"
    rig.leave(3, 1)
    assert rig.serve() == [Admission(1, 1, 10)]


def test_if_all_have_to_let_others_pass_the_first_is_admitted() -> None:
    rig = full_pool()
    for session in (1, 2):
        rig.ask(session, 1, 10)
        rig.queue._turns.sessions[session].penalty_until_s = 100.0
    assert rig.serve() == []
    rig.ask(3, 1, 10)
    rig.leave(0, 1)
    assert rig.serve() == [Admission(1, 1, 10)], "it was its turn before the third came"
    rig.leave(1, 1)
    assert rig.serve() == [Admission(3, 1, 10)]


def test_with_a_doubled_turn_a_session_has_one_sequence_while_others_wait() -> None:
    rig = Rig(10, 4, CONFIG, (1, 1, 4))
    rig.queue._turns.sessions[1].num_doublings = 1
    rig.ask(0, 1, 6)
    for session, sequence, num_blocks in ((2, 1, 6), (1, 2, 4), (3, 1, 6)):
        rig.ask(session, sequence, num_blocks)
    for before, session in ((0, 2), (2, 3)):
        rig.leave(before, 1)
        assert rig.serve() == [Admission(session, 1, 6)]
    rig.leave(1, 1)
    assert rig.serve() == [Admission(1, 2, 4)]


def test_a_swapped_out_sequence_comes_back_by_the_queue() -> None:
    rig = full_pool()
    rig.ask(1, 1, 5)
    rig.queue.swapped_out(0, 1)
    rig.held[0].clear()
    assert rig.ask(0, 1, 10) == MustWait(Reason.QUEUE, 2, 1)
    assert rig.serve() == [Admission(1, 1, 5)]


def test_the_place_is_the_number_of_those_in_front() -> None:
    rig = full_pool(num_sessions=30)
    positions = [rig.ask(session, 1, 1) for session in range(1, 30)]
    assert [each.position for each in positions if each] == list(range(1, 30))


def test_a_line_has_a_rule_without_settings() -> None:
    rig = Rig(100, 1, AdmissionConfig())
    rig.queue = AdmissionQueue(rig)
    rig.queue.open(0)
    assert rig.ask(0, 1, 50) is None
    assert rig.ask(0, 2, 50) == MustWait(Reason.BLOCKS, 1, 2), "one block is headroom"
