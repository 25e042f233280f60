"""Tickets for pushes: once, not for long, and not too many."""

from __future__ import annotations

import pytest

from data_plane.blocks_from_outside import Lane
from kvplane.errors import NotPermittedError, QuotaExceededError
from kvplane.integrations.push import tickets
from kvplane.integrations.push.tickets import Ticket, Tickets


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ticket(session_id: int = 1, caller: str = "a") -> Ticket:
    return Ticket(Lane(caller, session_id), 1, 1, range(4), 4096)


def test_a_ticket_is_taken_once() -> None:
    given = Tickets()
    first, second = given.give(ticket(1)), given.give(ticket(2))
    assert given.find(second) == given.find(second)
    assert given.take(second).lane.session_id == 2
    assert given.take(first).lane.session_id == 1
    for used in (first, second, b"", bytes(32)):  # and secrets that are made up
        with pytest.raises(NotPermittedError, match="serves once"):
            given.take(used)
        with pytest.raises(NotPermittedError, match="serves once"):
            given.find(used)


def test_secrets_are_long_and_never_the_same() -> None:
    given = Tickets()
    secrets = {given.give(ticket(session_id)) for session_id in range(50)}
    assert len(secrets) == 50
    assert {len(secret) for secret in secrets} == {32}


def test_a_ticket_expires() -> None:
    clock = Clock()
    given = Tickets(clock)
    old = given.give(ticket())
    clock.now_s += tickets.LIFETIME_S / 2
    new = given.give(ticket())
    clock.now_s += tickets.LIFETIME_S / 2
    with pytest.raises(NotPermittedError):
        given.take(old)
    assert given.take(new) == ticket()


def test_tickets_that_are_not_used_are_bounded_and_make_room_when_they_expire() -> None:
    clock = Clock()
    given = Tickets(clock)
    for _ in range(tickets.MAX_TICKETS_PER_SESSION):
        given.give(ticket(1))
    with pytest.raises(QuotaExceededError, match="of the session"):
        given.give(ticket(1))
    for session_id in range(len(given), tickets.MAX_TICKETS_PER_CALLER):
        given.give(ticket(session_id))
    with pytest.raises(QuotaExceededError, match="768 of the caller"):
        given.give(ticket(-1))
    for session_id in range(len(given), tickets.MAX_TICKETS):
        given.give(ticket(session_id, "b"))
    with pytest.raises(QuotaExceededError, match="1024 in all"):
        given.give(ticket(-1, "b"))
    clock.now_s += tickets.LIFETIME_S
    given.give(ticket(1))
    assert len(given) == 1
