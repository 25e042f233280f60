"""The engine's loop: how texts end, and that planes that fail cost time but never a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.request import SamplingParams
from engine.running.core import MAX_FAILURES
from engine.scheduling.intents import Span
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    PlaneUnavailableError,
    SessionExpiredError,
    SessionNotFoundError,
    StaleEpochError,
)
from kvplane.runtime.link import ControlLink
from kvplane.sync.loop_thread import LoopThread
from kvplane.transformers.attention import Step
from tests.helpers.engine_harness import LLAMA, Engine, Reference, loaded, prompt_of, save_model
from tests.helpers.refusals import refused


def test_a_stop_token_ends_a_text_and_stays_in_it(folder: Path, reference: Reference) -> None:
    prompt = prompt_of(11, 4)
    want = reference.greedy(prompt, 20)
    stop = next(token for i, token in enumerate(want) if i >= 3 and token not in want[:i])
    engine = Engine(folder)
    ends = engine.add(prompt, max_tokens=20, stop_token_ids=(stop,))
    goes_on = engine.add(prompt, max_tokens=20)
    engine.run()
    assert engine.tokens(ends) == [want[: want.index(stop) + 1]]
    assert engine.outputs[ends].outputs[0].finish_reason == "stop"
    assert engine.tokens(goes_on) == [want]
    assert engine.outputs[goes_on].outputs[0].finish_reason == "length"


def test_the_models_own_end_of_sequence_counts_unless_it_is_ignored(
    folder: Path, reference: Reference, tmp_path: Path
) -> None:
    prompt = prompt_of(11, 4)
    want = reference.greedy(prompt, 12)
    end = next(token for i, token in enumerate(want) if i >= 2 and token not in want[:i])
    config = type(LLAMA)(**{**LLAMA.to_dict(), "eos_token_id": end})
    engine = Engine(save_model(config, tmp_path))
    ends = engine.add(prompt, max_tokens=12)
    ignores = engine.add(prompt, max_tokens=12, ignore_eos=True)
    engine.run()
    assert engine.tokens(ends) == [want[: want.index(end) + 1]]
    assert engine.tokens(ignores) == [want]


def test_a_text_ends_where_the_model_has_no_positions_left(
    folder: Path, reference: Reference
) -> None:
    engine = Engine(folder)
    request = engine.add(prompt_of(250, 1), max_tokens=50)
    engine.run()
    assert engine.tokens(request) == [reference.greedy(prompt_of(250, 1), 6)]
    assert engine.outputs[request].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("tokens", "field"),
    [
        ([], "prompts[2]"),
        ([5, 97], "prompts[2][1]"),
        ([-1], "prompts[2][0]"),
        ([5] * 256, "prompts[2]"),
    ],
)
def test_a_prompt_that_the_model_can_not_take_is_refused_by_name(
    folder: Path, tokens: list[int], field: str
) -> None:
    with refused(InvalidRequestError, field):
        Engine(folder).core.check_prompt(tokens, SamplingParams(), field="prompts[2]")


def disturbed(folder: Path, **settings: int) -> tuple[Engine, list[str]]:
    """Greedy and sampled requests, some with several continuations."""
    engine = Engine(folder, **settings)
    ids = [
        engine.add(prompt_of(21, 1), max_tokens=18),
        engine.add(prompt_of(40, 2), max_tokens=14, n=3, temperature=1.3, seed=7),
        engine.add(prompt_of(5, 3), max_tokens=25, temperature=0.9, seed=8),
        engine.add(prompt_of(33, 4), max_tokens=9),
    ]
    return engine, ids


@pytest.fixture(scope="module")
def calm(folder: Path) -> list[list[list[int]]]:
    """What they answer when nothing goes wrong."""
    engine, ids = disturbed(folder)
    engine.run()
    return [engine.tokens(request_id) for request_id in ids]


def assert_same(engine: Engine, ids: list[str], calm: list[list[list[int]]]) -> None:
    """Same tokens, and each was told exactly once."""
    assert [engine.tokens(request_id) for request_id in ids] == calm
    for request_id, want in zip(ids, calm, strict=True):
        for index, tokens in enumerate(want):
            told = [
                token
                for delta in engine.deltas
                if (delta.request_id, delta.index) == (request_id, index)
                for token in delta.token_ids
            ]
            assert told == tokens


# Layers count up over all steps: a prompt step, the step of forks, and a decoding step.
@pytest.mark.parametrize(
    ("error", "at"),
    [
        *((InternalError("planted"), at) for at in (1, 4, 9)),
        (StaleEpochError("planted"), 2),
        (SessionExpiredError("planted"), 5),
        (SessionNotFoundError("planted"), 11),
        (PlaneUnavailableError("planted"), 5),
    ],
)
def test_a_layer_that_fails_costs_a_plan_or_a_session_and_no_token(
    folder: Path, calm: list[list[list[int]]], error: KvplaneError, at: int
) -> None:
    engine, ids = disturbed(folder)
    engine.backend.faults[at] = error
    engine.run()
    costs_a_session = not isinstance(error, InternalError)
    assert engine.core.stats.num_reopened_sessions == costs_a_session
    assert engine.core.stats.num_aborted_plans == (not costs_a_session)
    assert_same(engine, ids, calm)


def test_a_step_that_is_not_answered_costs_a_session_and_no_token(
    folder: Path, calm: list[list[list[int]]]
) -> None:
    engine, ids = disturbed(folder)
    for _ in range(4):
        engine.deltas += engine.core.step()
        engine.link.faults.append(PlaneUnavailableError("planted"))
    engine.run()
    assert engine.core.stats.num_reopened_sessions == 4
    assert_same(engine, ids, calm)


def test_a_control_plane_that_restarts_costs_no_token_and_what_was_published_is_found_again(
    folder: Path, calm: list[list[list[int]]]
) -> None:
    engine, ids = disturbed(folder)
    for _ in range(6):
        engine.deltas += engine.core.step()
    engine.planes.restart_control_plane(incarnation=2)
    engine.run()
    assert engine.core.stats.num_reopened_sessions == 1
    assert engine.planes.observed().counters.num_hit_tokens > 0
    assert_same(engine, ids, calm)


def test_a_fault_that_stays_is_raised_in_the_end(folder: Path) -> None:
    engine, _ = disturbed(folder)
    engine.backend.faults = {at: InternalError("planted") for at in range(1, 100)}
    with pytest.raises(InternalError, match="planted"):
        engine.run()
    assert engine.backend.num_layers_run == MAX_FAILURES + 1


def test_an_engine_that_has_raised_recovers_from_what_comes_next(
    folder: Path, calm: list[list[list[int]]]
) -> None:
    engine, ids = disturbed(folder)
    num = MAX_FAILURES + 1
    engine.backend.faults = {at: InternalError("planted") for at in range(1, num + 1)}
    engine.backend.faults[num + 1] = StaleEpochError("its session ended with its planes")
    with pytest.raises(InternalError, match="planted"):
        engine.run()
    engine.run()
    assert_same(engine, ids, calm)


@pytest.mark.parametrize("passes_s", [0.0, 10.0])
@pytest.mark.parametrize("params", [{}, {"n": 3, "temperature": 1.0}, {"num_beams": 2}])
def test_logits_that_are_not_finite_fail_their_request_alone_and_are_never_cached(
    folder: Path, reference: Reference, tmp_path: Path, params: dict[str, Any], passes_s: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = torch.nan  # in no prompt of ``prompt_of``
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path, max_plan_s=passes_s)
    goes_on = engine.add(prompt_of(20, 4), max_tokens=6)
    engine.deltas += engine.core.step()
    prompt = [*prompt_of(16, 5), 2, *prompt_of(100, 6)]  # its first part is without a next token
    fails = [engine.add(prompt, max_tokens=6, **params) for _ in range(MAX_FAILURES + 2)]
    engine.run()
    later = engine.add(prompt, max_tokens=6)
    engine.run()
    engine.check_greedy(reference, goes_on)
    for request in [*fails, later]:
        assert not any(engine.tokens(request))
        assert isinstance(engine.outputs[request].error, InternalError)
        assert engine.outputs[request].outputs[0].finish_reason == "error"
    assert engine.outputs[later].num_cached_tokens == 0
    assert engine.core.stats.num_reopened_sessions == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_of_logits_that_are_not_finite_is_never_sampled(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """From the second token of a continuation on; some -infinity beside finite logits is right."""
    engine = Engine(folder)
    fails = engine.add(prompt_of(20, 5), max_tokens=6)
    goes_on = engine.add(prompt_of(20, 4), max_tokens=6)
    run = engine.core._runner.run

    def broken(spans: Sequence[Span], step: Step) -> torch.Tensor:
        logits = run(spans, step).clone()
        for place, span in enumerate(spans):
            logits[place, 0] = -torch.inf
            if span.sequence.request.request_id == fails and span.num_tokens == 1:
                logits[place, :] = value
        return logits

    monkeypatch.setattr(engine.core._runner, "run", broken)
    engine.run()
    engine.check_greedy(reference, goes_on)
    assert engine.tokens(fails) == [reference.greedy(prompt_of(20, 5), 1)]
    assert isinstance(engine.outputs[fails].error, InternalError)


def test_a_pool_that_stays_away_is_raised_in_the_end(folder: Path) -> None:
    engine, _ = disturbed(folder)
    engine.core.step()
    engine.planes.core.disconnect("pool", 0, engine.planes.executor.epoch)
    engine.planes.restart_control_plane(incarnation=2)
    engine.planes.core.disconnect("pool", 0, engine.planes.executor.epoch)
    with pytest.raises(KvplaneError):
        engine.run()


def test_what_a_step_brought_before_it_failed_is_told_all_the_same(folder: Path) -> None:
    """One request can never fit, and the step that says so fails later on."""
    engine = Engine(folder, num_device_blocks=8)
    fails = engine.add(prompt_of(100, 1), max_tokens=2)
    stays = engine.add(prompt_of(10, 2), max_tokens=2)
    engine.backend.faults[1] = StaleEpochError("planted")
    engine.run()
    assert [d.finish_reason for d in engine.deltas if d.request_id == fails] == ["error"]
    assert len([d for d in engine.deltas if d.request_id == stays]) == 2


def test_the_engine_keeps_no_keys_or_values(folder: Path) -> None:
    """After a step every tensor that lives is a weight, a buffer or a random state."""
    engine = Engine(folder)
    engine.add(prompt_of(30, 1), max_tokens=5)
    engine.core.step()
    sequence = engine.scheduler.running[0]
    held = [getattr(sequence, name) for name in sequence.__slots__]
    assert not any(isinstance(each, torch.Tensor) for each in held)
    assert sequence.logits == []


def test_without_a_session_there_is_no_receipt_to_send() -> None:
    """As after an outage that was too long: the requests have failed, and there is no work."""
    loop = LoopThread("test-link")
    try:
        link = ControlLink(loop, "127.0.0.1:1", "default", timeout_s=1.0)
        with pytest.raises(InternalError, match="no session is open"):
            _ = link.session
        link.submit_receipts()
        link.close()
    finally:
        loop.close()


def test_a_text_that_is_too_long_whatever_its_tokens_are_is_not_tokenized(folder: Path) -> None:
    read: list[str] = []

    class Encoder:
        def __call__(self, text: str) -> dict[str, list[int]]:
            read.append(text)
            return {"input_ids": [7]}

        def apply_chat_template(self, messages: Any, **_: Any) -> dict[str, list[int]]:
            return self("".join(each["content"] for each in messages))

    model = replace(loaded(folder, 16), encoder=Encoder(), longest_token=4)
    for text in ("x" * 64, "x" * 65):
        messages = [{"role": "user", "content": part} for part in (text[:9], text[9:])]
        if len(text) == 64:
            assert model.encode(text, field="") == model.encode_chat(messages, field="") == [7]
            continue
        with refused(InvalidRequestError, "prompt", "65 characters"):
            model.encode(text, field="prompt")
        with refused(InvalidRequestError, "messages", "65 characters"):
            model.encode_chat(messages, field="messages")
    assert read == ["x" * 64] * 2
