"""Limits the open requests of an HTTP server, of all clients and of each."""

from __future__ import annotations

from collections import Counter

from kvplane.errors import QuotaExceededError


class OpenRequests:
    """Limits the open HTTP requests of all clients and of each; see ``share_of_one``."""

    def __init__(self, max_requests: int, num_clients: int) -> None:
        """``num_clients``: how many clients have an API key."""
        self._max_requests = max_requests
        self._most_of_one = share_of_one(max_requests, num_clients)
        self._of_clients: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._of_clients.total()

    def begin(self, client: str) -> None:
        """Count a request as open until ``end``. Raises QuotaExceededError when too many are."""
        bounds = (
            (len(self), self._max_requests, ""),
            (self._of_clients[client], self._most_of_one, " of one key"),
        )
        for num, most, whose in bounds:
            if num >= most:
                raise QuotaExceededError(
                    f"{most} requests{whose} are open, which is the most", retry_delay_s=1.0
                )
        self._of_clients[client] += 1

    def end(self, client: str) -> None:
        """Count a request of ``begin`` as ended."""
        self._of_clients[client] -= 1
        if not self._of_clients[client]:
            del self._of_clients[client]


def share_of_one(most: int, num_clients: int) -> int:
    """Return how much of ``most`` one client may have; an equal share is left to the others."""
    return most - most // num_clients if num_clients > 1 else most
