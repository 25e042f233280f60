"""The plan of a step is asked for while the one before is computed; it changes no token."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from engine.scheduling.sequence import SequenceStatus
from kvplane.errors import InternalError, StaleEpochError
from kvplane.wire import columns
from tests.helpers.engine_harness import LLAMA, Engine, Reference, prompt_of

NUM_LAYERS = LLAMA.num_hidden_layers
LONG_S = 1000.0  # a plan that may take so long has as many passes as a plan may have


def test_a_plan_is_asked_for_before_the_one_before_is_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder)
    engine.add(prompt_of(9, 1), max_tokens=6)
    num_asked = engine.asked_at_layers(monkeypatch)
    engine.run()
    # Six plans; the last token's place says that it is the last before it is known.
    assert num_asked[::NUM_LAYERS] == [2, 3, 4, 5, 6, 6]
    appends = [step[0].append for step in engine.link.steps[1:6]]
    assert [columns.read(columns.INT32, a.num_tokens, "")[0] for a in appends] == [0, 1, 1, 1, 1]
    assert [columns.read(columns.INT32, a.num_slots, "")[0] for a in appends] == [1] * 5


def test_what_ends_unforeseen_is_computed_once_too_often_and_freed(
    folder: Path, reference: Reference
) -> None:
    """One of two sequences meets a stop token; the row that was planned for it is passed over."""
    engine = Engine(folder)
    wanted = reference.greedy(prompt_of(9, 1), 10)
    at = next(i for i, token in enumerate(wanted) if token not in wanted[:i] and i >= 3)
    stopped = engine.add(prompt_of(9, 1), max_tokens=10, stop_token_ids=(wanted[at],))
    going = engine.add(prompt_of(12, 2), max_tokens=10)
    engine.run()
    assert engine.tokens(stopped) == [wanted[: at + 1]]
    engine.check_greedy(reference, going)
    assert engine.backend.batch_sizes[1:10] == [2] * (at + 1) + [1] * (8 - at)


def test_a_plan_of_nothing_but_what_has_ended_is_not_computed(
    folder: Path, reference: Reference
) -> None:
    engine = Engine(folder)
    prompt = prompt_of(9, 1)
    wanted = reference.greedy(prompt, 10)
    at = next(i for i, token in enumerate(wanted) if token not in wanted[:i] and i >= 3)
    request_id = engine.add(prompt, max_tokens=10, stop_token_ids=(wanted[at],))
    engine.run()
    assert engine.tokens(request_id) == [wanted[: at + 1]]
    assert engine.backend.num_layers_run == (at + 1) * NUM_LAYERS


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_request_that_is_ended_after_it_was_planned_leaves_others_alone(
    folder: Path, reference: Reference, num_steps: int
) -> None:
    """``num_steps``: of the others before it comes. Its admission may be planned already."""
    engine = Engine(folder)
    kept = engine.add(prompt_of(12, 2), max_tokens=12)
    engine.core.step()
    ended = engine.add(prompt_of(20, 3), max_tokens=10, n=2, temperature=1.0)
    for _ in range(num_steps):
        engine.core.step()
    engine.core.abort(ended)
    engine.core.abort("request-unknown")
    engine.run()
    engine.check_greedy(reference, kept)
    outputs = engine.core.take_output(ended).outputs
    assert {output.finish_reason for output in outputs} == {"abort"}
    if num_steps == 5:
        assert all(0 < len(output.token_ids) < 10 for output in outputs)


@pytest.mark.parametrize("max_plan_s", [0.0, LONG_S], ids=["one by one", "passes"])
@pytest.mark.parametrize("num_tokens", [7, 8, 9])  # 15 to 17 of prompt and answer, in blocks of 8
def test_blocks_of_what_was_generated_are_found_again(
    folder: Path, num_tokens: int, max_plan_s: float
) -> None:
    """The token that fills the last block is known only after its slot was computed."""
    engine = Engine(folder, max_plan_s=max_plan_s)
    prompt = prompt_of(9, 1)
    first = engine.add(prompt, max_tokens=num_tokens)
    engine.run()
    engine.core.settle()
    (tokens,) = engine.tokens(first)
    again = engine.add(prompt + tokens, max_tokens=1)
    engine.run()
    output = engine.core.take_output(again)
    assert output is not None
    assert output.num_cached_tokens == (len(prompt) + num_tokens - 1) // 8 * 8


def requests(random_: random.Random) -> list[dict[str, Any]]:
    """Of all kinds: greedy and not, of several continuations, with stop tokens, with priorities."""
    made = []
    for seed in range(10):
        sampled = random_.random() < 0.5
        made.append(
            {
                "prompt": prompt_of(random_.randint(3, 40), seed % 7),
                "max_tokens": random_.randint(1, 16),
                "n": random_.choice([1, 1, 2, 3]) if sampled else 1,
                "temperature": 0.8 if sampled else 0.0,
                "seed": seed,
                "stop_token_ids": tuple(random_.sample(range(97), 4)),
                "priority": random_.randint(-1, 1),
                "repetition_penalty": random_.choice([1.0, 1.3]),
            }
        )
    return made


def walk(folder: Path, seed: int, *, disturbed: bool, **settings: Any) -> list[list[list[int]]]:
    """The tokens of random requests that come while others run. ``disturbed``: plans fail, and
    requests come and are ended.
    """
    random_ = random.Random(seed)
    engine = Engine(folder, **settings)
    wanted = requests(random_)
    if disturbed:
        errors = (InternalError("planted"), StaleEpochError("planted"))
        engine.backend.faults = {
            at: random_.choice(errors) for at in range(random_.randint(5, 20), 400, 37)
        }
    ids: list[str] = []
    others: list[str] = []
    while wanted or engine.core.has_work:
        if wanted and random_.random() < 0.4:
            given = wanted.pop(0)
            ids.append(engine.add(given.pop("prompt"), **given))
        if disturbed and random_.random() < 0.1:
            others.append(engine.add(prompt_of(random_.randint(3, 30), 50), max_tokens=9))
        if others and random_.random() < 0.3:
            engine.core.abort(others.pop())
        engine.deltas += engine.core.step()
        for sequence in engine.scheduler.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.num_computed < len(sequence.tokens) + max(2, sequence.num_due + 1)
    return [engine.tokens(request_id) for request_id in ids]


ROOM = {"num_device_blocks": 64, "num_host_blocks": 16}
TIGHT = {"num_device_blocks": 14, "num_host_blocks": 0}
SWAPPING = {"num_device_blocks": 14, "num_host_blocks": 30}


@pytest.fixture(scope="module")
def calm(folder: Path) -> Callable[[int], list[list[list[int]]]]:
    """What is answered where no plan is asked for ahead."""
    return cache(partial(walk, folder, disturbed=False, plans_ahead=False, **ROOM))


@pytest.mark.parametrize("max_plan_s", [0.0, LONG_S], ids=["one by one", "passes"])
@pytest.mark.parametrize("disturbed", [False, True], ids=["calm", "disturbed"])
@pytest.mark.parametrize("sizes", [ROOM, TIGHT, SWAPPING], ids=["room", "tight", "swapping"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_planning_ahead_changes_no_token(
    folder: Path,
    calm: Callable[[int], list[list[list[int]]]],
    sizes: dict[str, int],
    disturbed: bool,
    seed: int,
    max_plan_s: float,
) -> None:
    how = {"max_batch_tokens": 24, "max_plan_s": max_plan_s, **sizes}
    assert walk(folder, seed, disturbed=disturbed, **how) == calm(seed)
