"""What the file tier has done, as numbers that never decrease. Metrics read them."""

from __future__ import annotations

import threading
from collections import Counter


class FileCounts:
    """Counted on several threads."""

    def __init__(self) -> None:
        self.num_blocks: Counter[str] = Counter()
        """"written" and "loaded"."""
        self.num_misses: Counter[str] = Counter()
        """Blocks that could not be had from their files, by ``FileMissError.reason``."""
        self.num_write_errors: Counter[str] = Counter()
        """By the operating system's name of the error, such as "ENOSPC"."""
        self._lock = threading.Lock()

    def moved(self, direction: str, num: int) -> None:
        """Count blocks."""
        with self._lock:
            self.num_blocks[direction] += num

    def missed(self, reason: str) -> None:
        """Count a block."""
        with self._lock:
            self.num_misses[reason] += 1

    def failed(self, reason: str) -> None:
        """Count a write."""
        with self._lock:
            self.num_write_errors[reason] += 1
