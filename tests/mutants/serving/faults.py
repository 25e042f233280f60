"""Planted faults of the engine's thread behind the HTTP server, with the test that catches each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.serving import worker
from engine.serving.worker import EngineWorker
from kvplane.errors import KvplaneError

Fault = Callable[[pytest.MonkeyPatch], None]


def a_closed_stream_goes_on(patch: pytest.MonkeyPatch) -> None:
    """A request is not aborted when its stream is closed."""
    original = EngineWorker.__init__

    def init(self: EngineWorker, engine: Any, max_requests: int) -> None:
        engine.abort = lambda request_id: None
        original(self, engine, max_requests)

    patch.setattr(EngineWorker, "__init__", init)


def any_number_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """Open requests are not counted."""
    original = EngineWorker.__init__
    patch.setattr(
        EngineWorker, "__init__", lambda self, engine, most: original(self, engine, most * 100)
    )


def a_bad_prompt_ends_the_thread(patch: pytest.MonkeyPatch) -> None:
    """What a prompt's reading raises is not caught."""

    def submit(self: EngineWorker, submission: Any) -> None:
        request_id = self._engine.submit(submission.read(), submission.params)
        self._open[request_id] = submission
        submission.request_id = request_id

    patch.setattr(EngineWorker, "_submit", submit)


def prompts_are_read_all_at_once(patch: pytest.MonkeyPatch) -> None:
    """No step comes between prompts that take long to read."""
    patch.setattr(worker, "_READ_S", 3600.0)


def a_failure_is_told_to_nobody(patch: pytest.MonkeyPatch) -> None:
    """The requests that a step failed are forgotten."""

    def fail_all(self: EngineWorker, error: KvplaneError) -> None:
        self._open.clear()

    patch.setattr(EngineWorker, "_fail_all", fail_all)


def stopping_is_told_to_nobody(patch: pytest.MonkeyPatch) -> None:
    """The thread ends and leaves its requests waiting."""

    def run(self: EngineWorker) -> None:
        while self._take():
            self._step()

    patch.setattr(EngineWorker, "_run", run)


def answers_are_mixed_up(patch: pytest.MonkeyPatch) -> None:
    """What a step adds goes to whoever came first."""
    original = EngineWorker._step

    def step(self: EngineWorker) -> None:
        first = next(iter(self._open.values()), None)
        if first is not None and len(self._open) > 1:
            self._open = dict.fromkeys(self._open, first)
        original(self)

    patch.setattr(worker.EngineWorker, "_step", step)


CAUGHT_BY: dict[Fault, str] = {
    prompts_are_read_all_at_once: "test_prompts_that_take_long_to_read_come_between_steps",
    a_closed_stream_goes_on: "test_a_stream_that_is_closed_aborts_its_request",
    any_number_is_accepted: "test_too_many_requests_are_refused",
    a_bad_prompt_ends_the_thread: "test_a_prompt_that_is_refused_leaves_the_others_alone",
    a_failure_is_told_to_nobody: "test_a_failure_that_does_not_pass_fails_what_is_open_alone",
    stopping_is_told_to_nobody: "test_stopping_fails_what_is_open_and_what_comes",
    answers_are_mixed_up: "test_requests_come_and_go_while_others_run",
}
