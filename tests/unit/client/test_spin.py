"""Looking for a packet before sleeping, and when not to."""

from __future__ import annotations

import time

import pytest

from kvplane.transport.local import spin
from kvplane.transport.local.spin import Spin


class Looks:
    """Finds something at look ``at``; look ``slow`` takes as long as one that was interrupted."""

    def __init__(self, at: int = 10**9, slow: int = -1) -> None:
        self.num = 0
        self._at, self._slow = at, slow

    def __call__(self) -> bool:
        self.num += 1
        if self.num == self._slow:
            time.sleep(0.001)
        return self.num >= self._at


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that interrupts for no less than half a millisecond, so that others may run too."""
    monkeypatch.setattr(spin, "_INTERRUPTED_S", 0.0005)


def test_it_looks_until_there_is_something() -> None:
    looks = Looks(at=5)
    assert Spin(10.0).look(looks)
    assert looks.num == 5


def test_it_looks_for_no_longer_than_it_may() -> None:
    looks = Looks()
    began_s = time.monotonic()
    assert not Spin(0.01).look(looks)
    assert time.monotonic() - began_s < 5
    assert looks.num > 1
    looks = Looks()
    assert not Spin(10.0).look(looks, until_s=time.monotonic())
    assert looks.num == 1


@pytest.mark.parametrize("at", [3, 10**9], ids=["that found something", "that found nothing"])
def test_after_a_look_that_was_interrupted_it_looks_once_at_a_time(at: int) -> None:
    eager, looks = Spin(10.0), Looks(at=at, slow=3)
    assert eager.look(looks) == (at == 3)
    assert looks.num == 3
    later = Looks()
    assert not eager.look(later)
    assert later.num == 1
    eager._not_before_s = 0.0  # when the pause is over
    assert eager.look(Looks(at=4))
