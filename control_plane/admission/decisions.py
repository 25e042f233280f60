"""The queue's view of its pool, and the queue's decisions.

Sessions and sequences are ints, numbers of blocks are device blocks, and times are seconds of the
caller's clock. Here a *sequence* is an admission with all its forks: they hold the same blocks, so
they have one turn, grow as one and are cut together.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol


class PoolView(Protocol):
    """How many device blocks of a pool are free, held or coming back, as the admission queue sees
    them. A physical block counts once, however many tables share it.
    """

    @property
    def num_blocks(self) -> int:
        """Count all device blocks of the pool, whatever their state."""

    def num_obtainable(self, session: int) -> int:
        """Count the blocks that the session could allocate now: free, evictable, its own
        retired.
        """

    def num_pending(self, session: int) -> int:
        """Count the blocks that the session cannot allocate yet, but that will be free once
        outstanding receipts and fences arrive.
        """

    def num_held(self, session: int, sequence: int) -> int:
        """Count the blocks that a sequence and its forks refer to; perhaps too high,
        never too low.
        """

    def num_held_by(self, session: int) -> int:
        """Count the blocks that a session's live sequences refer to; perhaps too high, never too
        low.
        """

    def last_progress(self, session: int, sequence: int) -> tuple[float, bool]:
        """Return when the sequence or a fork of it last made progress (something was scheduled or
        receipted, or it got blocks), and whether a plan in flight computes it.
        """

    def retired_since(self, session: int) -> float | None:
        """Return when the oldest block was retired that waits for this session's receipts."""


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Settings of the admission queue.

    ``turn_s``: how long a sequence may stay while others wait; it must be long enough for the
    longest prefill. ``max_doublings``: how often a session's turn can double. ``idle_s``: how long
    a sequence that no plan in flight computes may stay without progress while others wait.
    ``grace_s``: how long a session waits before a sequence is asked to yield, and how long that
    sequence then has. ``receipt_deadline_s``: how long blocks that others wait for may lack a
    receipt. ``headroom``: the share of the pool that admissions leave free for growth while any
    sequence is live.
    """

    turn_s: float = 30.0
    max_doublings: int = 5
    idle_s: float = 10.0
    grace_s: float = 1.0
    receipt_deadline_s: float = 30.0
    headroom: float = 0.01


class Reason(enum.Enum):
    """Why a sequence has to wait for blocks, or has to give its blocks up."""

    QUEUE = enum.auto()  # others stand in front of it, or its session waits for another sequence
    GROWTH = enum.auto()  # sequences that are live already need the blocks
    BLOCKS = enum.auto()  # it is its turn, and there are not enough blocks yet
    TURN = enum.auto()  # the sequence is past its turn, and others wait
    IDLE = enum.auto()  # the sequence makes no progress, and others wait


@dataclass(frozen=True, slots=True)
class MustWait:
    """Decision that an admission has to wait. ``position``: how many places from the front of the
    queue it is at most, 0 when it is not queued. ``sequence``: the sequence that the session has
    queued, if any.
    """

    reason: Reason
    position: int = 0
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """Decision that a live sequence whose growth was blocked gets its blocks now."""

    session: int
    sequence: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Admission:
    """Decision that the head of the queue may be admitted if it needs at most ``num_blocks``."""

    session: int
    sequence: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """Warning that a sequence will be cut at ``deadline_s``, unless it ends before or nobody needs
    its blocks any more.
    """

    session: int
    sequence: int
    num_blocks: int
    deadline_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class Cut:
    """Decision that a sequence loses its device blocks now. The queue has already removed it."""

    session: int
    sequence: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class EndSession:
    """Decision to end, and so fence, a session: others wait for blocks that lack its receipts."""

    session: int


Grant = Growth | Admission
Decision = Pressure | Cut | EndSession
