"""New sequences wait for what is loaded of them from files; others do not."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from engine.request import Request, SamplingParams
from engine.scheduling.loading import LoadingScheduler
from engine.scheduling.sequence import EngineSequence, SequenceStatus
from kvplane.errors import PlaneUnavailableError
from kvplane.prefixes import Loaded


class Rig:
    """A scheduler whose loads end when a test says so."""

    def __init__(self) -> None:
        self.loads: list[tuple[list[int], Future[Loaded]]] = []
        self.scheduler = LoadingScheduler(
            self._load, block_size_tokens=8, max_batch_tokens=64, max_sequences=8
        )

    def arrive(self, number: int) -> EngineSequence:
        tokens = [number] * 20
        request = Request(f"r{number}", number, "", tokens, SamplingParams())
        nothing: Any = None
        sequence = EngineSequence(request, 0, tokens, number, nothing)
        self.scheduler.arrive(sequence)
        return sequence

    def admitted(self) -> list[EngineSequence]:
        return [s for intent in self.scheduler.schedule() for s in intent.sequences]

    def _load(self, tokens: Any) -> Future[Loaded]:
        future: Future[Loaded] = Future()
        self.loads.append((list(tokens), future))
        return future


def test_a_sequence_is_admitted_when_its_load_has_ended_and_others_meanwhile() -> None:
    rig = Rig()
    first, second = rig.arrive(1), rig.arrive(2)
    assert [tokens for tokens, _ in rig.loads] == [first.tokens, second.tokens]
    assert rig.admitted() == []
    assert rig.scheduler.has_work
    rig.loads[1][1].set_result(Loaded(16, 16))
    assert rig.admitted() == [second]
    rig.loads[0][1].set_result(Loaded(0, 0))
    rig.scheduler.finish(second)
    assert first in rig.admitted()


def test_a_load_that_fails_is_no_more_than_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    sequence = rig.arrive(1)
    rig.loads[0][1].set_exception(PlaneUnavailableError("the data plane is stopping"))
    assert rig.admitted() == [sequence]
    assert "nothing was loaded" in caplog.text


def test_a_sequence_that_ends_while_it_is_loaded_is_not_admitted() -> None:
    rig = Rig()
    sequence = rig.arrive(1)
    rig.scheduler.finish(sequence)
    assert sequence.status is SequenceStatus.FINISHED
    assert rig.loads[0][1].cancelled()
    assert not rig.scheduler.has_work
    assert rig.admitted() == []


def test_after_the_session_was_lost_all_that_waits_is_loaded_again() -> None:
    rig = Rig()
    sequence, loading = rig.arrive(1), rig.arrive(2)
    rig.loads[0][1].set_result(Loaded(0, 0))
    assert rig.admitted() == [sequence]
    rig.scheduler.reset()
    assert [tokens for tokens, _ in rig.loads[2:]] == [sequence.tokens]
    for _, future in rig.loads[1:]:
        future.set_result(Loaded(16, 16))
    assert rig.admitted() == [sequence, loading]
