"""Engines that share a pool: one waits in the control plane's line, and one has to yield."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.running.core import NEWS_DELAY_S
from kvplane.results import sequence_states
from kvplane.wire import columns
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.engine_harness import TENANT, Engine, Reference, prompt_of


def pair(
    folder: Path, num_host_blocks: int = 0, *, plans_ahead: bool = True
) -> tuple[Engine, Engine]:
    """Two engines on a pool of 12 blocks of 8 tokens. ``plans_ahead``: of the first. Without it the
    first is at rest between steps, and not at work on a plan.
    """
    one = Engine(
        folder,
        num_device_blocks=12,
        num_host_blocks=num_host_blocks,
        recovery_timeout_s=60.0,
        plans_ahead=plans_ahead,
    )
    return one, Engine(folder, shared_with=one, recovery_timeout_s=60.0)


class Clock:
    """Stands in for the module ``time``: the time passes only in waits."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The engines' time."""
    clock = Clock()
    monkeypatch.setattr("engine.running.core.time", clock)
    return clock


def finish(engine: Engine) -> None:
    """Run to the end; the client would submit the last receipt by itself."""
    engine.run()
    engine.core.settle()


def pass_time(engine: Engine, seconds: float, *others: Engine) -> None:
    planes = engine.planes
    planes.core.tick()
    for _ in range(round(seconds / 0.25)):
        planes.now_s += 0.25
        planes.core.tick()
        for each in (engine, *others):
            planes.core.renew_session(each.link.session.ref, TENANT)


def num_admits(engine: Engine) -> int:
    return sum(
        operation.WhichOneof("operation") == "admit"
        for step in engine.link.steps
        for operation in step
    )


def test_an_admission_that_waits_is_asked_for_once(
    folder: Path, reference: Reference, clock: Clock
) -> None:
    one, other = pair(folder)
    one.add(prompt_of(60, 1), max_tokens=20)
    one.core.step()
    other.add(prompt_of(40, 2), max_tokens=8)
    for _ in range(20):
        other.core.step()
    assert other.scheduler.is_queued
    assert (num_admits(other), len(other.link.steps)) == (1, 1), "it does not poll"
    finish(one)
    finish(other)
    assert num_admits(other) == 1
    one.check_greedy(reference)
    other.check_greedy(reference)


def test_without_a_notice_the_engine_asks_for_news_by_itself(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair(folder)
    one.add(prompt_of(60, 1), max_tokens=2)
    one.core.step()
    second = other.add(prompt_of(40, 2), max_tokens=2)
    other.core.step()
    finish(one)
    monkeypatch.setattr(other.link, "has_news", lambda wait_s: clock.sleep(wait_s))
    finish(other)
    assert NEWS_DELAY_S < clock.monotonic() < 2 * NEWS_DELAY_S
    assert len(other.tokens(second)[0]) == 2


def test_a_request_that_waits_can_be_ended(folder: Path) -> None:
    one, other = pair(folder)
    one.add(prompt_of(60, 1), max_tokens=20)
    one.core.step()
    ended, stays = (other.add(prompt_of(40, seed), max_tokens=2) for seed in (2, 3))
    other.core.step()
    other.core.abort(ended)
    other.core.step()
    finish(one)
    finish(other)
    assert other.tokens(ended) == [[]]
    assert len(other.tokens(stays)[0]) == 2


def test_what_was_cut_is_computed_again(folder: Path, reference: Reference) -> None:
    one, other = pair(folder, plans_ahead=False)
    one.add(prompt_of(60, 1), max_tokens=20)
    one.core.step()
    one.core.settle()
    other.add(prompt_of(40, 2), max_tokens=8)
    other.core.step()
    pass_time(one, 13.0, other)
    assert one.planes.observed().statistics.cut_sequences.total() == 1
    one.core.step()
    one.core.settle()
    finish(other)
    finish(one)
    assert one.core.stats.num_recompute_preemptions == 1
    one.check_greedy(reference)
    other.check_greedy(reference)


def test_what_would_be_cut_is_swapped_out(folder: Path, reference: Reference) -> None:
    one, other = pair(folder, num_host_blocks=12, plans_ahead=False)
    one.add(prompt_of(60, 1), max_tokens=20)
    one.core.step()
    one.core.settle()
    other.add(prompt_of(40, 2), max_tokens=8)
    other.core.step()
    pass_time(one, 10.5, other)
    for _ in range(3):
        one.core.step()
    one.core.settle()
    assert one.core.stats.num_swap_preemptions == 1
    finish(other)
    finish(one)
    assert one.planes.observed().statistics.cut_sequences.total() == 0
    one.check_greedy(reference)
    other.check_greedy(reference)


def test_a_grant_before_an_abort_is_taken_up(folder: Path, reference: Reference) -> None:
    one, other = pair(folder)
    one.add(prompt_of(60, 1), max_tokens=2)
    one.core.step()
    other.add(prompt_of(40, 2), max_tokens=8)
    other.core.step()
    finish(one)
    assert other.scheduler.is_queued
    core, session = other.planes.core, other.link.session
    kv_id = other.scheduler.waiting[0].kv_id
    request = pb.ListSequencesRequest(
        session=session.ref, sequence_ids=columns.pack(columns.INT64, [kv_id])
    )
    other.scheduler.reconcile(sequence_states(core.list_sequences(request, TENANT).sequences))
    assert not other.scheduler.is_queued
    finish(other)
    other.check_greedy(reference)
