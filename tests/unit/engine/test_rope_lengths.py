"""Models whose RoPE depends on the longest sequence of a forward pass: an engine keeps sequences
apart by its context limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_harness import LLAMA, Engine, Reference, prompt_of, save_model
from transformers import LlamaConfig

from engine.request import SamplingParams
from kvplane.errors import InvalidRequestError

LENGTH = 64
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


def check_prompt(engine: Engine, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=8)
    engine.core.check_prompt(prompt_of(num_tokens, 1), params, field="prompts[0]")


def test_what_neighbours_are_answered_depends_on_no_length(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", LONGROPE)
    engine, reference = Engine(folder), Reference(folder)
    prompts = [prompt_of(20, 1), prompt_of(LENGTH - 4, 2), prompt_of(9, 3)]
    for _ in range(2):  # again from what the first time left
        ids = [engine.add(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
        engine.run()
        for prompt, request_id in zip(prompts, ids, strict=True):
            (answer,) = engine.tokens(request_id)
            assert len(answer) == min(40, LENGTH - len(prompt))
            assert answer == reference.greedy(prompt, len(answer))
    engine.check_quiet()


def test_a_longer_prompt_is_refused_by_name(tmp_path: Path) -> None:
    engine = Engine(saved(tmp_path / "model", LONGROPE))
    check_prompt(engine, LENGTH - 1)
    with pytest.raises(InvalidRequestError, match=f"fewer than {LENGTH}: .*RoPE") as caught:
        check_prompt(engine, LENGTH)
    assert caught.value.field == "prompts[0]"
    engine.check_quiet()
