"""Waits for what happens in another task, thread or process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], object], patience_s: float = 30.0) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    async with asyncio.timeout(patience_s):
        while not holds():
            await asyncio.sleep(0.01)
