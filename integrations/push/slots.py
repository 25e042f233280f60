"""How many pushes of one direction are under way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvplane.errors import QuotaExceededError

NUM_RESERVED: Final = 1
"""Pushes beside those of one caller, which only others can have."""


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
