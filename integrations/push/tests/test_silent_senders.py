"""A push is cut off when its sender says nothing more, and not when its receiver is busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvplane.integrations.push import receiver

PATIENCE_S = 60.0
LOOKS_S = 0.2  # in which the watcher looks several times


class Clock:
    """Stands for the module ``time``; only the test lets it go on."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Call:
    """The context of a call."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return patched_clock(monkeypatch)


def patched_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(receiver, "time", clock)
    for name in ("OPEN_S", "STALL_S"):
        monkeypatch.setattr(receiver, name, 0.02)
    return clock


def test_the_receivers_own_time_is_no_silence(clock: Clock) -> None:
    call = Call()
    given: Any = iter([1, 2])
    with receiver._Silence(call) as silence:
        requests = silence.each(given)
        for number in (1, 2):
            assert next(requests) == number
            clock.now_s += 100.0  # a write waits for its turn
            assert not call.cancelled.wait(LOOKS_S)
        assert list(requests) == []


def test_a_sender_that_says_nothing_more_is_cut_off(clock: Clock) -> None:
    call = Call()

    def silent() -> Iterator[Any]:
        yield 1
        clock.now_s += 2 * receiver.STALL_S
        assert call.cancelled.wait(PATIENCE_S)

    with receiver._Silence(call) as silence:
        assert list(silence.each(silent())) == [1]


def test_a_sender_that_reads_no_answer_is_cut_off(clock: Clock) -> None:
    call = Call()
    with receiver._Silence(call) as silence, silence.waiting():
        clock.now_s += 2 * receiver.STALL_S
        assert call.cancelled.wait(PATIENCE_S)


def test_a_sender_that_says_little_now_and_then_is_cut_off(clock: Clock) -> None:
    call = Call()

    def slow() -> Iterator[Any]:
        for number in range(10):
            yield number
            clock.now_s += 0.15
            if call.cancelled.wait(LOOKS_S):
                return

    with receiver._Silence(call) as silence:
        silence.allow(0.5)
        assert list(silence.each(slow())) == [0, 1, 2, 3]
