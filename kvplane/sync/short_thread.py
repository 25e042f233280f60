"""A thread that makes one call and ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def call_in_short_thread(function: Callable[[], Result]) -> Result:
    """What ``function`` returns, or raises, in a thread that ends with it.

    For what computes with torch before the thread that computes from then on. GNU OpenMP keeps the
    helpers of each thread that computed until that thread ends, and once it has more of them than
    there are CPUs it lets none wait for its next work: each operation then wakes them, which on two
    CPUs makes a small model's step half as long again.
    """
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(function).result()
