"""Tickets: the holder of one may write the slots of one span of a plan, once.

What a ticket permits is checked again with each write: the plan must still be its session's latest,
and the blocks must have the generations that the plan gave them.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from data_plane.blocks_from_outside import Lane
from kvplane.errors import NotPermittedError, QuotaExceededError

LIFETIME_S: Final = 30.0
MAX_TICKETS: Final = 1024
MAX_TICKETS_PER_SESSION: Final = 64
_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Ticket:
    """``lane``: the session, and whose time the writes count as. ``blocks``: the table entries of
    the sequence that are to be written. ``num_bytes``: of them, in all layers and groups.
    """

    lane: Lane
    plan_number: int
    sequence_id: int
    blocks: range
    num_bytes: int


class Tickets:
    """The tickets that were given and not used. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds that only grow."""
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[bytes, tuple[float, Ticket]] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def give(self, ticket: Ticket) -> bytes:
        """The secret that names the ticket from now on. Raises QuotaExceededError."""
        with self._lock:
            self._drop_expired()
            of_session = sum(
                other.lane.session_id == ticket.lane.session_id for _, other in self._open.values()
            )
            if len(self._open) >= MAX_TICKETS or of_session >= MAX_TICKETS_PER_SESSION:
                raise QuotaExceededError(
                    f"{of_session} tickets of the session and {len(self._open)} in all are not "
                    f"used yet: use them, or wait until they expire, {LIFETIME_S:g} s after they "
                    "were given",
                    retry_delay_s=LIFETIME_S,
                )
            secret = secrets.token_bytes(_SECRET_BYTES)
            self._open[secret] = self._clock(), ticket
            return secret

    def find(self, secret: bytes) -> Ticket:
        """The ticket, which can still be taken. Raises NotPermittedError for one that was used, is
        too old or was never given.
        """
        with self._lock:
            return self._found(secret)

    def take(self, secret: bytes) -> Ticket:
        """The ticket, which is used up now. Raises as ``find``."""
        with self._lock:
            ticket = self._found(secret)
            del self._open[secret]
        return ticket

    def _found(self, secret: bytes) -> Ticket:
        self._drop_expired()
        _, ticket = self._open.get(secret, (0.0, None))
        if ticket is None:
            raise NotPermittedError(
                "there is no such ticket, or not any more: a ticket serves once and for "
                f"{LIFETIME_S:g} s. Get another by ReceiveBlocks",
                field="open.secret",
            )
        return ticket

    def _drop_expired(self) -> None:
        oldest_s = self._clock() - LIFETIME_S
        while self._open:
            secret, (given_s, _) = next(iter(self._open.items()))
            if given_s > oldest_s:
                return
            del self._open[secret]
