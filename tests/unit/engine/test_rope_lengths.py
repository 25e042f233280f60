"""Models whose RoPE depends on the longest sequence of a forward pass: an engine keeps sequences
apart by its context limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, RobertaConfig

from engine.request import SamplingParams
from kvplane.errors import InvalidRequestError
from tests.helpers.engine_harness import LLAMA, Engine, Reference, loaded, prompt_of, save_model
from tests.helpers.refusals import refused

LENGTH = 64
MAX_TOKENS = 4 * LENGTH
NUM_NEW = 16
LONG_PROMPT = prompt_of(150, 2)
SHORT_PROMPT = prompt_of(25, 11)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": LENGTH,
}


def saved(folder: Path, rope: dict[str, Any], **entries: Any) -> Path:
    config = {**LLAMA.to_dict(), "rope_parameters": rope, **entries}
    return save_model(LlamaConfig.from_dict(config), folder)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def check_prompt(engine: Engine, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=8)
    engine.core.check_prompt(prompt_of(num_tokens, 1), params, field="prompts[0]")


def test_what_neighbours_are_answered_depends_on_no_length(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", LONGROPE)
    engine, reference = Engine(folder), Reference(folder)
    prompts = [SHORT_PROMPT, prompt_of(LENGTH - 4, 2), prompt_of(9, 3)]
    for _ in range(2):  # again from what the first time left
        ids = [engine.add(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
        engine.run()
        for prompt, request_id in zip(prompts, ids, strict=True):
            (answer,) = engine.tokens(request_id)
            assert len(answer) == min(40, LENGTH - len(prompt))
            assert answer == reference.greedy(prompt, len(answer))


def test_a_longer_prompt_is_refused_by_name(tmp_path: Path) -> None:
    engine = Engine(saved(tmp_path / "model", LONGROPE))
    check_prompt(engine, LENGTH - 1)
    with refused(InvalidRequestError, "prompts[0]", match=f"fewer than {LENGTH}: .*RoPE"):
        check_prompt(engine, LENGTH)


def test_frequencies_of_a_chosen_length_are_all_sequences(tmp_path: Path) -> None:
    """Long ones are answered as by transformers, short ones as by a model that has no others."""
    long_alone = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
    folder, alike = saved(tmp_path / "m", LONGROPE), saved(tmp_path / "alike", long_alone)
    answers = check_fixed(folder, Reference(alike))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = list(LONG_PROMPT)
    with torch.inference_mode():
        for _ in range(NUM_NEW):  # generate would keep the keys of each step's frequencies
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    assert answers[1] == tokens[len(LONG_PROMPT) :]


def test_dynamic_frequencies_of_a_chosen_length_are_all_sequences(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    entries = {"max_position_embeddings": LENGTH}
    scale = rope["factor"] * MAX_TOKENS / LENGTH - (rope["factor"] - 1)
    of_length = {"rope_type": "default", "rope_theta": 10_000.0 * scale ** (16 / 14)}
    folder = saved(tmp_path / "model", rope, **entries)
    check_fixed(folder, Reference(saved(tmp_path / "alike", of_length, **entries)))


def check_fixed(folder: Path, reference: Reference) -> list[list[int]]:
    """The answers to prompts of all lengths are the reference's, beside each other and cached."""
    engine = Engine(folder, num_device_blocks=128, max_total_tokens=MAX_TOKENS)
    prompts = [SHORT_PROMPT, LONG_PROMPT, prompt_of(LENGTH - 4, 3), LONG_PROMPT[:48]]
    for _ in range(2):  # again from what the first time left
        ids = [engine.add(prompt, max_tokens=NUM_NEW, ignore_eos=True) for prompt in prompts]
        engine.run()
        answers = [engine.tokens(request_id)[0] for request_id in ids]
        assert answers == [reference.greedy(prompt, NUM_NEW) for prompt in prompts]
    check_prompt(engine, MAX_TOKENS - 1)
    with pytest.raises(InvalidRequestError, match=f"fewer than max_total_tokens, {MAX_TOKENS}"):
        check_prompt(engine, MAX_TOKENS)
    return answers


def test_a_chosen_length_is_within_the_models_and_names_the_keys(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", LONGROPE, max_position_embeddings=MAX_TOKENS)
    with pytest.raises(InvalidRequestError, match="must be at most the model's 256 pos"):
        loaded(folder, MAX_TOKENS + 1)
    names = {n: loaded(folder, n).namespace for n in (0, 64, 65)}
    assert names == {0: "", 64: "", 65: "rope-65"}


@pytest.mark.parametrize("rope", [YARN, LINEAR], ids=["yarn", "linear"])
def test_scaled_rope_is_served_as_far_as_it_is_scaled(tmp_path: Path, rope: dict[str, Any]) -> None:
    rope = {"rope_theta": 10_000.0, **rope}
    folder = saved(tmp_path / "model", rope, max_position_embeddings=LENGTH)
    engine, reference = Engine(folder), Reference(folder)
    prompts = [prompt_of(100, 1), prompt_of(20, 2), prompt_of(MAX_TOKENS - 8, 3)]
    ids = [engine.add(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
    engine.run()
    for prompt, request_id, num_tokens in zip(prompts, ids, (12, 12, 8), strict=True):
        (answer,) = engine.tokens(request_id)
        assert answer == reference.greedy(prompt, num_tokens)
    check_prompt(engine, MAX_TOKENS - 1)
    with pytest.raises(InvalidRequestError, match="fewer than the model's 256 positions"):
        check_prompt(engine, MAX_TOKENS)


def test_dynamic_frequencies_are_refused_by_name_where_they_begin(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    engine = Engine(saved(tmp_path / "model", rope, max_position_embeddings=LENGTH))
    check_prompt(engine, LENGTH - 2)
    with pytest.raises(InvalidRequestError, match=f"fewer than {LENGTH - 1}: .*RoPE"):
        check_prompt(engine, LENGTH)


def test_a_scaled_kind_of_layers_extends_no_other_kind(tmp_path: Path) -> None:
    """Gemma 3's positions count those that scaling adds to its full attention."""
    scaled = {"rope_theta": 10_000.0, **LINEAR}
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        layer_types=["sliding_attention", "full_attention"], bos_token_id=None, eos_token_id=None,
        rope_parameters={"sliding_attention": DEFAULT, "full_attention": scaled}, pad_token_id=0,
    )  # fmt: skip
    assert loaded(save_model(config, tmp_path / "model"), 0).max_total_tokens == LENGTH


def test_positions_that_begin_behind_paddings_are_fewer(tmp_path: Path) -> None:
    config = RobertaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, is_decoder=True,
        num_attention_heads=4, max_position_embeddings=LENGTH, pad_token_id=1,
    )  # fmt: skip
    assert loaded(save_model(config, tmp_path / "model"), 0).max_total_tokens == LENGTH - 2
