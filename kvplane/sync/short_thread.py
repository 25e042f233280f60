"""A thread that makes one call and ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def call_in_short_thread(function: Callable[[], Result]) -> Result:
    """Call ``function`` in a thread that ends with it. Returns its result, or raises its error.

    Use it for torch work before the main compute thread begins. GNU OpenMP keeps the helpers of
    each thread that computed until that thread ends. Once it has more helpers than CPUs, none of
    them spins for its next work, so each operation has to wake them: on two CPUs a small model's
    step takes half as long again.
    """
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(function).result()
