"""Polls for a packet for a while before sleeping: to wake a thread up takes 50 to 500 µs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

# A look takes microseconds. One that took longer was interrupted: others want the core, and the
# scheduler takes it from a polling thread for milliseconds at a time.
_INTERRUPTED_S: Final = 0.0003
_PAUSE_S: Final = 1.0


class Spin:
    """Polls for packets, for one thread."""

    def __init__(self, spin_s: float) -> None:
        """``spin_s``: how many seconds to poll; not at all while others want the core."""
        self.spin_s = spin_s
        self._not_before_s = 0.0

    def look(self, find: Callable[[], T], *, until_s: float | None = None) -> T:
        """Call ``find`` until its result is true or the time is over; returns the result.
        ``until_s``: on the monotonic clock, in place of ``spin_s`` from now.
        """
        now_s = time.monotonic()
        end_s = now_s + self.spin_s if until_s is None else until_s
        while True:
            found = find()
            before_s, now_s = now_s, time.monotonic()
            if now_s - before_s > _INTERRUPTED_S:
                self._not_before_s = now_s + _PAUSE_S
            if found or now_s >= end_s or now_s < self._not_before_s:
                return found
