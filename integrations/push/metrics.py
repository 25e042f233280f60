"""What has been pushed, as numbers that never decrease. Metrics read them."""

from __future__ import annotations

import threading
from collections import Counter


class PushCounts:
    """Counted on several threads. ``direction``: "sent" or "received"."""

    def __init__(self) -> None:
        self.num_bytes: Counter[str] = Counter()
        """By direction; of pushes that failed too."""
        self.num_pushes: Counter[tuple[str, str]] = Counter()
        """By direction and outcome: "OK", or the reason of the error."""
        self._lock = threading.Lock()

    def moved(self, direction: str, num_bytes: int) -> None:
        """Count the bytes of blocks."""
        with self._lock:
            self.num_bytes[direction] += num_bytes

    def ended(self, direction: str, outcome: str) -> None:
        """Count a push."""
        with self._lock:
            self.num_pushes[direction, outcome] += 1
