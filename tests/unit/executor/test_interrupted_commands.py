"""Ctrl-C may come at any point of a command: the next one, on any thread, can run."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator

import pytest

from data_plane.execution.executor import Executor
from tests.helpers.data.data_rig import Rig

NUM_INTERRUPTS = 400
PATIENCE_S = 10.0


@pytest.fixture
def interrupted() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_ctrl_c_leaves_the_lock_free(interrupted: None) -> None:
    executor = Rig().executor
    rng = random.Random(1)
    for _ in range(NUM_INTERRUPTS):
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-4))
            while True:
                executor.finish()
        assert is_free_for_others(executor)


def is_free_for_others(executor: Executor) -> bool:
    lock, told = executor._command.lock, []

    def run() -> None:
        told.append(lock.acquire(timeout=PATIENCE_S))
        if told[0]:
            lock.release()

    other = threading.Thread(target=run)
    other.start()
    other.join()
    return told == [True]
