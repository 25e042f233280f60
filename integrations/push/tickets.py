"""Tickets: the holder of one may write the slots of one span of a plan, once.

What a ticket permits is checked again with each write: the plan must still be its session's latest,
and the blocks must have the generations that the plan gave them. How many pushes a caller can have
at one time is bounded too.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from data_plane.blocks_from_outside import Lane
from kvplane.errors import NotPermittedError, QuotaExceededError

LIFETIME_S: Final = 30.0
MAX_TICKETS: Final = 1024
MAX_TICKETS_PER_SESSION: Final = 64
MAX_TICKETS_PER_CALLER: Final = 768
_SECRET_BYTES: Final = 32
NUM_RESERVED: Final = 1
"""Pushes beside those of one caller, which only others can have."""


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
            lanes = [other.lane for _, other in self._open.values()]
            of_session = sum(lane.session_id == ticket.lane.session_id for lane in lanes)
            of_caller = sum(lane.caller == ticket.lane.caller for lane in lanes)
            if (
                len(lanes) >= MAX_TICKETS
                or of_caller >= MAX_TICKETS_PER_CALLER
                or of_session >= MAX_TICKETS_PER_SESSION
            ):
                raise QuotaExceededError(
                    f"{of_session} tickets of the session, {of_caller} of the caller and "
                    f"{len(lanes)} in all are not used yet: use them, or wait until they expire, "
                    f"{LIFETIME_S:g} s after they were given",
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
        """The ticket, which is used up now. Raises the same errors as ``find``."""
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


class PushSlots:
    """One is always left to callers other than the busiest. Thread-safe."""

    def __init__(self, max_pushes: int) -> None:
        """``max_pushes``: of one caller."""
        self._most_of_one = max_pushes
        self._most = max_pushes + NUM_RESERVED
        self._lock = threading.Lock()
        self._of_callers: Counter[str] = Counter()

    @contextmanager
    def taken(self, caller: str) -> Iterator[None]:
        """During a push for ``caller``. Raises QuotaExceededError."""
        with self._lock:
            num, of_one = self._of_callers.total(), self._of_callers[caller]
            if num >= self._most or of_one >= self._most_of_one:
                raise QuotaExceededError(
                    f"{of_one} pushes of this caller and {num} in all are under way, which is the "
                    "most: try again",
                    retry_delay_s=0.1,
                )
            self._of_callers[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._of_callers[caller] -= 1
                if not self._of_callers[caller]:
                    del self._of_callers[caller]
