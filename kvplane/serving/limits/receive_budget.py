"""Limits the bytes of requests that a server has received and not answered yet."""

from __future__ import annotations

from typing import Final

from kvplane.errors import QuotaExceededError

_RETRY_DELAY_S: Final = 0.1
_NO_BOUND: Final = 2**62


class ReceiveBudget:
    """Limits the bytes of received requests that wait for answers, of all callers and of each."""

    def __init__(self, max_bytes: int = _NO_BOUND, max_caller_bytes: int = _NO_BOUND) -> None:
        self._max_bytes = max_bytes
        self._max_caller_bytes = max_caller_bytes
        self._callers: dict[str, int] = {}
        self.num_bytes = 0
        """Bytes held now, of all callers."""

    def take(self, caller: str, num_bytes: int) -> None:
        """Count a request of ``caller``. Raises QuotaExceededError when there is no room for it.
        The only request of a caller may exceed its limit, and the only one of a server the total,
        as it is in memory already.
        """
        held = self._callers.get(caller, 0)
        if held and held + num_bytes > self._max_caller_bytes:
            raise QuotaExceededError(
                f"{held} bytes of this caller's requests are not answered yet, of at most "
                f"{self._max_caller_bytes}",
                retry_delay_s=_RETRY_DELAY_S,
            )
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise QuotaExceededError(
                f"{self.num_bytes} bytes of requests are not answered yet, of at most "
                f"{self._max_bytes}",
                retry_delay_s=_RETRY_DELAY_S,
            )
        self._callers[caller] = held + num_bytes
        self.num_bytes += num_bytes

    def give_back(self, caller: str, num_bytes: int) -> None:
        """Subtract the bytes of a request that was answered."""
        self.num_bytes -= num_bytes
        self._callers[caller] -= num_bytes
        if not self._callers[caller]:
            del self._callers[caller]


class Received:
    """The bytes of one request that arrives in parts, until ``close`` releases them."""

    def __init__(self, budget: ReceiveBudget, caller: str) -> None:
        self._budget = budget
        self._caller = caller
        self._num_bytes = 0

    def close(self) -> None:
        """Subtract all bytes that were counted."""
        if self._num_bytes:
            self._budget.give_back(self._caller, self._num_bytes)
            self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more. Raises QuotaExceededError when there is no room for them."""
        if num_bytes:
            self._budget.take(self._caller, num_bytes)
            self._num_bytes += num_bytes
