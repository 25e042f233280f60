"""A push is cut off when its sender says nothing more, and not when its receiver is busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from kvplane.integrations.push import receiver

PATIENCE_S = 60.0
ALLOWED_S = 1.0


class Call:
    """The context of a call."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def requests_of(call: Call, received: Any) -> Iterator[Any]:
    silence = receiver._Silence(call)
    silence.allow(ALLOWED_S)
    return silence.each(received)


def test_the_receivers_own_time_is_no_silence() -> None:
    call = Call()
    requests = requests_of(call, iter([1, 2]))
    for number in (1, 2):
        assert next(requests) == number
        assert not call.cancelled.wait(1.5 * ALLOWED_S)  # a write waits for its turn
    assert list(requests) == []


def test_a_sender_that_says_nothing_more_is_cut_off() -> None:
    call = Call()

    def silent() -> Iterator[Any]:
        yield 1
        assert call.cancelled.wait(PATIENCE_S)

    assert list(requests_of(call, silent())) == [1]


def test_a_sender_that_says_little_now_and_then_is_cut_off() -> None:
    call = Call()

    def slow() -> Iterator[Any]:
        for number in range(20):
            if call.cancelled.wait(0.3 * ALLOWED_S):
                return
            yield number

    began_s = time.monotonic()
    assert len(list(requests_of(call, slow()))) < 4
    assert time.monotonic() - began_s >= ALLOWED_S
