"""An engine whose steps of decoding are compiled answers as one that runs the model as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_graphs import Graphs
from tiny_models import VOCABULARY, save_tiny

from engine import LLM, SamplingParams
from engine.models import compiled
from kvplane.errors import InvalidRequestError
from tests.helpers.refusals import refused

PROMPTS_TOKENS = (50, 3, 21)
MAX_TOKENS = (9, 4, 12)
"""Sequences end one after another: steps have 3, 2 and 1 of them."""


def opened(folder: Path, control_plane: str, **settings: Any) -> LLM:
    return LLM(
        folder, control_plane=control_plane, data_plane="embedded", num_device_blocks=64,
        num_host_blocks=0, block_size_tokens=8, num_threads=1, timeout_s=60.0, max_sequences=3,
        probe=False, **settings,
    )  # fmt: skip


def answers(llm: LLM) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in PROMPTS_TOKENS]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in MAX_TOKENS]
    outputs = llm.generate([prompt.tolist() for prompt in prompts], params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("linears", ["torch", pytest.param("packed", marks=pytest.mark.nightly)])
def test_a_compiled_engine_gives_the_same_tokens_from_a_graph_for_each_size_of_a_batch(
    linears: str, tmp_path: Path, control_plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs()
    monkeypatch.setattr(compiled, "BACKEND", graphs)
    save_tiny("llama", tmp_path)
    with opened(tmp_path, control_plane, pool_id="as-written", linears=linears) as llm:
        wanted = answers(llm)
    compiling = {"compile": True, "linears": linears}
    with opened(tmp_path, control_plane, pool_id="compiled", **compiling) as llm:
        assert graphs.num == 3, "of 1, 2 and 4 sequences, before the first request"
        assert (graphs.num_inputs < 5) == (linears == "packed"), "Inductor needs frozen weights"
        assert answers(llm) == wanted
    assert graphs.num == 3, "more were made for steps"
    assert graphs.num_runs > 3, "no step ran them"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("linears", ["torch", "packed"])
@pytest.mark.parametrize("model_type", ["bloom", "deepseek_v3", "gemma2", "gpt_oss", "qwen3"])
def test_an_engine_whose_code_inductor_has_made_gives_the_same_tokens(
    model_type: str, linears: str, tmp_path: Path, control_plane: str
) -> None:
    save_tiny(model_type, tmp_path)
    with opened(tmp_path, control_plane, pool_id="as-written", linears=linears) as llm:
        wanted = answers(llm)
    compiling = {"compile": True, "linears": linears}
    with opened(tmp_path, control_plane, pool_id="compiled", **compiling) as llm:
        assert answers(llm) == wanted


def test_ranks_that_would_be_compiled_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with refused(InvalidRequestError, "compile"):
        LLM(tmp_path, compile=True, tensor_parallel=2)
