"""What has been pushed, as numbers that never decrease, and the metrics that tell them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from kvplane.serving.observability.metrics import Declaration, Samples

_TICKETS: Final = Declaration(
    "gauge",
    "kvplane_push_tickets",
    "Permissions to push blocks to this process that were given and not used.",
)
_BYTES: Final = Declaration(
    "counter",
    "kvplane_pushed_bytes_total",
    "Bytes of blocks sent to other data planes or received from them, by direction.",
    ("direction",),
)
_PUSHES: Final = Declaration(
    "counter",
    "kvplane_pushes_total",
    'Pushes that have ended, by direction and outcome: "OK", "CANCELLED" or an error\'s reason.',
    ("direction", "outcome"),
)
DECLARATIONS: Final = (_TICKETS, _BYTES, _PUSHES)


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

    def tell(self, samples: Samples, num_tickets: int) -> None:
        """Add all to a scrape."""
        samples.add(_TICKETS, num_tickets)
        for direction in ("sent", "received"):
            samples.add(_BYTES, self.num_bytes[direction], direction)
        for labels, count in [*self.num_pushes.items()]:
            samples.add(_PUSHES, count, *labels)
