"""Deadlines, and retries until then.

UNAVAILABLE is retried: the peer was not reached, closed the connection, or is not ready. With
``waits_for_quota``, an exceeded quota with a retry delay is retried too.
Every call of the protocol may be repeated until it is answered, so this is safe for all of them.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from kvplane.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QuotaExceededError,
    UnavailableError,
)

FIRST_DELAY_S: Final = 0.05
MAX_DELAY_S: Final = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, on the monotonic clock, after which an answer is of no use."""

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Return the deadline ``timeout_s`` from now. Raises InvalidRequestError unless it is above
        0 and finite.
        """
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise InvalidRequestError("must be above 0 and finite", field="timeout_s")
        return cls(timeout_s, time.monotonic() + timeout_s)

    @property
    def remaining_s(self) -> float:
        """Return the seconds left, at least a millisecond, so that they are a valid timeout."""
        return max(0.001, self.at_s - time.monotonic())

    @asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Cancel the body at the deadline and raise DeadlineExceededError."""
        try:
            async with asyncio.timeout(self.remaining_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceededError(f"no answer within {self.timeout_s:g} s") from error


async def retry_until(
    deadline: Deadline, attempt: Callable[[], Awaitable[T]], *, waits_for_quota: bool = False
) -> T:
    """Return the result of ``attempt``, retried with exponential backoff and jitter.

    ``waits_for_quota``: also retry QuotaExceededError with a retry delay. Raises the last error
    when the next try would come after the deadline, and every other error at once. A peer's own
    retry delay is respected.
    """
    delay_s = FIRST_DELAY_S
    while True:
        try:
            return await attempt()
        except (UnavailableError, QuotaExceededError) as error:
            is_quota = isinstance(error, QuotaExceededError)
            if is_quota and (not waits_for_quota or error.retry_delay_s is None):
                raise
            wait_s = max(random.uniform(delay_s / 2, delay_s), error.retry_delay_s or 0.0)
            if wait_s >= deadline.remaining_s:
                raise
        await asyncio.sleep(wait_s)
        delay_s = min(2 * delay_s, MAX_DELAY_S)
