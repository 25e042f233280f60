"""Work that gives way to other work: a generator that yields wherever others may come between, and
returns what the work comes to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")

Pieces = Generator[None, None, T]


def finish(pieces: Pieces[T]) -> T:
    """Do all of it now."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result


def guarded(
    pieces: Pieces[T],
    lock: AbstractContextManager[object],
    guard: Callable[[], AbstractContextManager[None]],
) -> Pieces[T]:
    """The same, each piece inside of ``lock`` and ``guard()``."""
    while True:
        with lock, guard():
            try:
                next(pieces)
            except StopIteration as end:
                result: T = end.value
                return result
        yield


def whole(work: Callable[[], T]) -> Pieces[T]:
    """Work that gives way to none."""
    yield from ()
    return work()
