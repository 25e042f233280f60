"""Work that gives way to other work: a generator that yields wherever others may come between, and
returns what the work comes to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")

Slices = Generator[None, None, T]


def finish(slices: Slices[T]) -> T:
    """Do all of it now."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result


def guarded(
    slices: Slices[T],
    lock: AbstractContextManager[object],
    guard: Callable[[], AbstractContextManager[None]],
) -> Slices[T]:
    """The same, each slice inside of ``lock`` and ``guard()``."""
    while True:
        with lock, guard():
            try:
                next(slices)
            except StopIteration as end:
                result: T = end.value
                return result
        yield


def whole(work: Callable[[], T]) -> Slices[T]:
    """Work that gives way to none."""
    yield from ()
    return work()
