"""A plan has several tokens of each sequence that decodes, computed in passes; it changes none."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.scheduling import sequence
from kvplane.errors import InternalError, StaleEpochError
from kvplane.wire import columns
from tests.helpers.engine_harness import LLAMA, Engine, Reference, prompt_of

NUM_LAYERS = LLAMA.num_hidden_layers
LONG_S = 1000.0
MAX_PASSES, MAX_WASTED_PASSES = 8, 4


@pytest.fixture(autouse=True)
def short_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of a few passes show what plans of many do."""
    monkeypatch.setattr(sequence, "MAX_PASSES", MAX_PASSES)
    monkeypatch.setattr(sequence, "MAX_WASTED_PASSES", MAX_WASTED_PASSES)


def slots_asked(engine: Engine) -> list[list[int]]:
    """Of each Append that computes something."""
    appends = [
        columns.read(columns.INT32, operation.append.num_slots, "")
        for step in engine.link.steps
        for operation in step
        if operation.HasField("append")
    ]
    return [[*slots] for slots in appends if any(slots)]


@pytest.mark.parametrize(("stop", "most"), [((), MAX_PASSES), (("no end",), MAX_WASTED_PASSES)])
def test_the_control_plane_is_asked_once_for_many_tokens(
    folder: Path, reference: Reference, stop: tuple[str, ...], most: int
) -> None:
    """For fewer where a sequence may end early, whose row is computed to the plan's end."""
    engine = Engine(folder, max_plan_s=LONG_S, num_device_blocks=100)
    engine.add(prompt_of(9, 1), max_tokens=most + 4, stop=stop)
    engine.add(prompt_of(12, 2), max_tokens=most + 6, stop=stop)
    engine.run()
    engine.check_greedy(reference)
    # The prompts give a token each, and the plan that is asked for meanwhile another one.
    assert slots_asked(engine) == [[1, 1], [most, most], [2, 4]]
    assert engine.backend.batch_sizes[1 : 4 + most] == [2] * (3 + most)
    assert engine.backend.batch_sizes[4 + most : 6 + most] == [1, 1]


def test_a_sequence_that_runs_alone_has_long_plans_whose_last_passes_nobody_wants(
    folder: Path, reference: Reference
) -> None:
    """What comes after its end is not computed."""
    engine = Engine(folder, max_plan_s=LONG_S, num_device_blocks=100)
    prompt = prompt_of(9, 1)
    wanted = reference.greedy(prompt, 10)
    at = next(i for i, token in enumerate(wanted) if token not in wanted[:i] and i >= 4)
    ended = engine.add(prompt, max_tokens=10, stop_token_ids=(wanted[at],))
    engine.run()
    assert engine.tokens(ended) == [wanted[: at + 1]]
    assert slots_asked(engine) == [[1], [MAX_PASSES]]
    assert engine.backend.num_layers_run == (at + 1) * NUM_LAYERS


def test_plans_are_longer_where_nobody_can_arrive(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.running.core.time.monotonic", lambda: 0.0)  # passes take no time
    engine = Engine(folder, max_plan_s=1e-9)
    for may_arrive, longest in ((True, 1), (False, 6)):
        engine.core.may_arrive = may_arrive
        engine.add(prompt_of(9, 1), max_tokens=8)
        num_before = len(slots_asked(engine))
        engine.run()
        assert max(map(max, slots_asked(engine)[num_before:])) == longest


def test_each_pass_gives_its_tokens_at_once(folder: Path) -> None:
    engine = Engine(folder, max_plan_s=LONG_S)
    engine.add(prompt_of(9, 1), max_tokens=12)
    sizes = [len(engine.core.step()) for _ in range(12)]
    assert sizes == [1] * 12
    engine.run()


@pytest.mark.parametrize("error", [InternalError("planted"), StaleEpochError("planted")])
@pytest.mark.parametrize("at", [3, 4, 5])  # the pass that fails, of the first plan that has many
def test_a_pass_that_fails_loses_no_token(
    folder: Path, reference: Reference, error: Exception, at: int
) -> None:
    engine = Engine(folder, max_plan_s=LONG_S)
    engine.backend.faults = {(2 + at) * NUM_LAYERS: error}
    for prompt in (prompt_of(9, 1), prompt_of(12, 2)):
        engine.add(prompt, max_tokens=12)
    engine.run()
    engine.check_greedy(reference)
    assert not engine.backend.faults


def test_a_plan_after_an_abort_is_presented_once(folder: Path, reference: Reference) -> None:
    """It may have whole tables."""
    engine = Engine(folder, max_plan_s=LONG_S, num_device_blocks=100)
    engine.backend.faults = {3 * NUM_LAYERS: InternalError("planted")}  # the first of many passes
    engine.add(prompt_of(9, 1), max_tokens=2 * MAX_PASSES)
    engine.run()
    # Also of the plan that is asked for meanwhile.
    assert slots_asked(engine)[:5] == [[1], [MAX_PASSES], [1], [1], [MAX_PASSES]]
    engine.check_greedy(reference)


def test_a_plan_that_does_not_fit_has_one_token_of_each(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is preempted for it."""
    monkeypatch.setattr(sequence, "MAX_PASSES", 64)
    engine = Engine(folder, max_plan_s=LONG_S, num_device_blocks=9, num_host_blocks=0)
    for seed, length in ((1, 8), (2, 40)):
        engine.add(prompt_of(20, seed), max_tokens=length)
    engine.run()
    engine.check_greedy(reference)
    assert engine.core.stats.num_recompute_preemptions == 0
    assert {max(slots) for slots in slots_asked(engine)[1:-1]} == {1}
    assert max(slots_asked(engine)[-1]) > 16


def test_who_comes_waits_for_the_plan_and_no_longer(folder: Path, reference: Reference) -> None:
    engine = Engine(folder, max_plan_s=LONG_S, num_device_blocks=100)
    engine.add(prompt_of(9, 1), max_tokens=2 * MAX_PASSES)
    for _ in range(4):
        engine.core.step()
    later = engine.add(prompt_of(12, 2), max_tokens=4)
    num_steps = 0
    while not any(delta.request_id == later for delta in engine.core.step()):
        num_steps += 1
    assert num_steps <= MAX_PASSES + 1
    engine.run()
    engine.check_greedy(reference)


def test_plans_are_short_until_continuations_separate(folder: Path) -> None:
    engine = Engine(folder, max_plan_s=LONG_S)
    engine.add(prompt_of(9, 1), max_tokens=9, n=2, temperature=1.0)
    engine.add(prompt_of(12, 2), max_tokens=9)
    engine.run()
    slots = slots_asked(engine)
    assert slots[:2] == [[1], [1, 1, 1]]
    assert max(slots[2]) > 1


def test_plans_are_short_beside_a_beam_search(folder: Path) -> None:
    engine = Engine(folder, max_plan_s=LONG_S)
    engine.add(prompt_of(9, 1), max_tokens=5, num_beams=2, n=2)
    going = engine.add(prompt_of(12, 2), max_tokens=20)
    while len(engine.core._live) == 2:
        engine.core.step()
    assert {max(slots) for slots in slots_asked(engine)} == {1}
    engine.run()
    assert engine.tokens(going)


def test_the_next_plan_is_asked_for_in_the_last_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder, max_plan_s=LONG_S, num_device_blocks=100)
    engine.add(prompt_of(9, 1), max_tokens=2 + 2 * MAX_PASSES)
    num_asked = engine.asked_at_layers(monkeypatch)
    engine.run()
    of_plans = num_asked[1::NUM_LAYERS][2:]  # after the prompt and a plan of one token
    assert of_plans == [3] * (MAX_PASSES - 1) + [4] * (1 + MAX_PASSES)
