"""Work in slices: a generator that yields wherever others may run, and returns its result."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")

Slices = Generator[None, None, T]


def run_to_end(slices: Slices[T]) -> T:
    """Run all slices now, without a pause; returns the result."""
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
    """Run each slice inside of ``lock`` and of a new context ``guard()``."""
    while True:
        with lock, guard():
            try:
                next(slices)
            except StopIteration as end:
                result: T = end.value
                return result
        yield


def whole(work: Callable[[], T]) -> Slices[T]:
    """Wrap a function as work of one slice."""
    yield from ()
    return work()
