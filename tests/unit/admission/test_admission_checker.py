"""In small pools no session that keeps asking is starved, whatever the others do."""

from __future__ import annotations

import dataclasses

import pytest

from control_plane.admission.queue import AdmissionQueue
from control_plane.admission.turns import Claim, Claimant, Turns
from control_plane.admission.victims import QueueEntry
from tests.helpers.planning.admission_checker import CASES, CONFIG, QUICK, SLOW, World, starved


@pytest.mark.parametrize("name", QUICK)
def test_nobody_is_starved(name: str) -> None:
    found, num_states = starved(CASES[name])
    assert found == []
    assert num_states > 10


def test_nobody_is_starved_by_headroom() -> None:
    config = dataclasses.replace(CONFIG, headroom=0.25)
    assert starved(CASES["two, of the whole pool"], config)[0] == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SLOW)
def test_nobody_is_starved_in_a_larger_case(name: str) -> None:
    config = dataclasses.replace(CONFIG, max_doublings=SLOW[name])
    assert starved(CASES[name], config)[0] == []


def test_the_states_have_all_that_the_queue_remembers() -> None:
    """A field that is added has to be added to the states of the checker."""
    world = World(CASES["two that yield"])
    assert set(vars(world.queue)) == {"_pool", "_config", "_turns", "_entries", "_next_ticket"}
    assert set(vars(world.queue._turns)) == {
        *("sessions", "num_live", "num_blocked", "asked", "_turn_s", "_max_doublings", "_heap"),
        *("_next_rank", "_next_seniority"),
    }
    assert {type(world.queue), type(world.queue._turns)} == {AdmissionQueue, Turns}
    assert set(Claimant.__slots__) == {
        *("id", "num_doublings", "penalty_until_s", "seniority", "sequences"),
        # Never where the checker looks: what was due while it was, is done when it is no more.
        "is_busy",
    }
    assert set(Claim.__slots__) == {
        *("id", "session", "rank", "ends_s", "num_doublings", "num_blocked", "blocked_s"),
        *("in_heap", "deadline_s", "reason", "penalty_s", "idles_s"),
    }
    assert set(QueueEntry.__slots__) == {
        *("session", "sequence", "num_needed", "since_s", "ticket", "is_chosen"),
    }
