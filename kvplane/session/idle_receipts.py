"""Submits the last receipts of an engine that has nothing more to compute.

Receipts go with the next call. When no call comes, what the last plan wrote would stay hidden from
others, and the blocks that it let go of would stay retired; so a background task submits them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from kvplane.errors import DeadlineExceededError, KvplaneError, UnavailableError

_LOGGER: Final = logging.getLogger(__name__)

# An engine that is not idle makes its next call within a step's time, and saves this one.
IDLE_S: Final = 0.1
_RETRY_S: Final = 1.0


async def submit_when_idle(
    changed: asyncio.Event, submit: Callable[[], Awaitable[None]], session_id: int
) -> None:
    """Call ``submit`` whenever ``changed`` was set and then not again for ``IDLE_S`` seconds. Runs
    until it is cancelled.

    Tried again when the plane cannot be reached or says when to, and without the receipt that it
    refuses. Other refusals are logged, and nothing is sent before the next change.
    """
    while True:
        await changed.wait()
        changed.clear()
        await asyncio.sleep(IDLE_S)
        if changed.is_set():
            continue
        try:
            await submit()
        except KvplaneError as error:
            delay_s = error.retry_delay_s
            if isinstance(error, UnavailableError | DeadlineExceededError):
                delay_s = max(delay_s or 0.0, _RETRY_S)
            elif error.field.startswith("receipts["):
                delay_s = 0.0
            _LOGGER.warning("session=%d receipts not submitted: %s", session_id, error)
            if delay_s is not None:
                await asyncio.sleep(delay_s)
                changed.set()
