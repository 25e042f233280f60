"""Beam search finds what transformers finds; beams share the blocks that they have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.request import SamplingParams
from kvplane.errors import InternalError, InvalidRequestError, StaleEpochError
from tests.helpers.engine_harness import Engine, Reference, prompt_of
from tests.helpers.refusals import refused


def search(
    reference: Reference, prompt: list[int], max_tokens: int, ends: list[int], **how: Any
) -> list[list[int]]:
    """The token ids of each answer of transformers' own beam search, up to an end."""
    answers = reference.answers(prompt, max_tokens, eos_token_id=ends or None, **how)
    cut = [next((i + 1 for i, t in enumerate(a) if t in ends), len(a)) for a in answers]
    return [answer[:end] for answer, end in zip(answers, cut, strict=True)]


CASES: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": 0.0, "num_return_sequences": 4},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 5, "early_stopping": True, "num_return_sequences": 5},
    {"num_beams": 3, "repetition_penalty": 1.4},
]


def params_of(case: dict[str, Any]) -> dict[str, Any]:
    """As the engine names them."""
    return {"n" if name == "num_return_sequences" else name: value for name, value in case.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_ends", [0, pytest.param(1, marks=pytest.mark.nightly), 12])
def test_the_answers_are_those_of_transformers(
    folder: Path, reference: Reference, case: dict[str, Any], num_ends: int
) -> None:
    engine = Engine(folder)
    ends = list(range(20, 20 + 4 * num_ends, 4))
    prompts = [prompt_of(length, length) for length in (5, 16, 23)]
    ids = [
        engine.add(prompt, max_tokens=12, stop_token_ids=tuple(ends), **params_of(case))
        for prompt in prompts
    ]
    engine.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert engine.tokens(request_id) == search(reference, prompt, 12, ends, **case)
        told = [d for d in engine.deltas if d.request_id == request_id]
        assert [d.token_ids for d in told] == engine.tokens(request_id)
        for delta in told:
            assert delta.finish_reason == ("stop" if delta.token_ids[-1] in ends else "length")


def test_beams_share_the_prompt_and_copy_what_they_write(folder: Path) -> None:
    engine = Engine(folder, num_device_blocks=24)
    request_id = engine.add(prompt_of(60, 1), max_tokens=12, num_beams=8, n=8)
    engine.run()
    # Eight beams of 71 tokens would need 72 blocks of their own.
    assert engine.planes.observed().counters.max_held_blocks <= 24
    assert engine.core.stats.num_preemptions == 0
    assert engine.core.stats.num_forks > 7
    assert len(engine.tokens(request_id)) == 8


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_device_blocks": 11, "num_host_blocks": 0},
        {"num_device_blocks": 11, "num_host_blocks": 40},
        {"max_batch_tokens": 5},
        {"plans_ahead": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_disturbed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_search_beside_others_survives_preemption_and_failures(
    folder: Path, reference: Reference, sizes: dict[str, Any], is_disturbed: bool
) -> None:
    engine = Engine(folder, **sizes)
    greedy, searched = prompt_of(20, 1), prompt_of(17, 2)
    if is_disturbed:
        errors = (InternalError("planted"), StaleEpochError("planted"))
        engine.backend.faults = {at: errors[at % 2] for at in range(7, 120, 17)}
    one = engine.add(greedy, max_tokens=24)
    two = engine.add(searched, max_tokens=14, num_beams=4, n=2)
    three = engine.add(greedy[:9], max_tokens=10)
    engine.run()
    wanted = search(reference, searched, 14, [], num_beams=4, num_return_sequences=2)
    assert engine.tokens(two) == wanted
    assert engine.tokens(one) == [reference.greedy(greedy, 24)]
    assert engine.tokens(three) == [reference.greedy(greedy[:9], 10)]
    if "num_device_blocks" in sizes:
        assert engine.core.stats.num_preemptions > 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_search_can_be_ended(folder: Path, num_steps: int) -> None:
    engine = Engine(folder)
    ended = engine.add(prompt_of(9, 1), max_tokens=10, num_beams=4, n=2)
    for _ in range(num_steps):
        engine.core.step()
    engine.core.abort(ended)
    engine.run()
    output = engine.core.take_output(ended)
    assert output is not None
    assert [each.finish_reason for each in output.outputs] == ["abort"] * min(2, num_steps + 1)


def test_more_beams_than_sequences_are_refused(folder: Path) -> None:
    engine = Engine(folder, max_sequences=3)
    with refused(InvalidRequestError, "sampling_params.num_beams"):
        engine.core.check_prompt([5], SamplingParams(num_beams=4), field="prompt")


def test_a_search_beside_continuations_of_another_prompt_leaves_them_their_logits(
    folder: Path,
) -> None:
    """In one step a beam takes no row of its own, and a prompt of two continuations two."""
    alone = Engine(folder)
    wanted = alone.add(prompt_of(12, 3), max_tokens=6, n=2, temperature=0.9, seed=5)
    alone.run()
    both = Engine(folder)
    both.add(prompt_of(9, 1), max_tokens=6, num_beams=2)
    beside = both.add(prompt_of(12, 3), max_tokens=6, n=2, temperature=0.9, seed=5)
    both.run()
    assert both.tokens(beside) == alone.tokens(wanted)
