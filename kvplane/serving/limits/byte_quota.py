"""How many bytes a second each caller may make a server move.

A token bucket for each caller that holds the bytes of one second. Whoever has not overdrawn it may
go on, and may overdraw it once: a message can be larger than a second's bytes, and how large blocks
are is known only when they have been read. The next message then waits until that is made up for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvplane.errors import QuotaExceededError

_BURST_S: Final = 1.0


class ByteQuota:
    """The bucket of each caller. Thread-safe."""

    def __init__(
        self, max_bytes_per_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``max_bytes_per_s``: of each caller; 0 means no quota. ``clock``: seconds that only
        grow.
        """
        self._rate = max_bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        # When each bucket will be full again; those that are full are dropped now and then.
        self._full_s: dict[str, float] = {}
        self._next_sweep_s = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether there is a quota."""
        return self._rate > 0

    def __len__(self) -> int:
        """Callers that are remembered."""
        return len(self._full_s)

    def take(self, caller: str, num_bytes: int) -> None:
        """Count bytes before they are used. Raises QuotaExceededError with the seconds to wait when
        the caller has overdrawn its bucket; nothing is counted then.
        """
        self._count(caller, num_bytes, may_refuse=True)

    def add(self, caller: str, num_bytes: int) -> None:
        """Count bytes of what was let in before; they are never refused."""
        self._count(caller, num_bytes, may_refuse=False)

    def _count(self, caller: str, num_bytes: int, *, may_refuse: bool) -> None:
        if not self._rate:
            return
        with self._lock:
            now_s = self._clock()
            self._sweep(now_s)
            full_s = max(now_s, self._full_s.get(caller, now_s))
            overdrawn_s = full_s - now_s - _BURST_S
            if may_refuse and overdrawn_s > 0:
                raise QuotaExceededError(
                    f"the tenant may move {self._rate:g} bytes a second here",
                    retry_delay_s=overdrawn_s,
                )
            self._full_s[caller] = full_s + num_bytes / self._rate

    def _sweep(self, now_s: float) -> None:
        if now_s >= self._next_sweep_s:
            self._full_s = {c: full_s for c, full_s in self._full_s.items() if full_s > now_s}
            self._next_sweep_s = now_s + _BURST_S
