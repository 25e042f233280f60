"""Model families through each way in: ``generate`` on a PlaneCache, and the engine over planes,
give what transformers gives with eager attention. How each attends is in test_census.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, save_tiny, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import LLM, SamplingParams
from kvplane.errors import InvalidRequestError
from kvplane.transformers import PlaneCache, close_planes
from kvplane.transformers.models import adapters
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.plane_cache_checks import (
    ARGUMENT,
    BLOCK_SIZE,
    CHECKS,
    Check,
    beams,
    block_edges,
    conversation,
    greedy_with_padding,
    rows_with_hits,
    sampling,
)
from tests.models import census

FAMILIES = (
    "deepseek_v3", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "gpt2", "gpt_oss", "llama",
    "mistral", "mixtral", "olmo3", "opt", "phi3", "qwen3",
)  # fmt: skip
ADAPTED = ("bloom", "falcon", "mpt")
HYBRIDS = (
    "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5", "qwen3_next",
    "zamba2",
)  # fmt: skip
"""With running states: jamba and minimax are refused."""
HYBRID_CHECKS = (greedy_with_padding, block_edges, rows_with_hits, beams, sampling, conversation)
WHOLE = ("deepseek_v3", "gpt_oss")
"""Checked in all ways on each push, the others in one."""
HYBRIDS_ON_PUSH = ("falcon_h1", "lfm2", "qwen3_next")
CASES = [
    pytest.param(
        family,
        check,
        id=f"{family}-{check.__name__}",
        marks=() if family in WHOLE or check is greedy_with_padding else pytest.mark.nightly,
    )
    for family in (*FAMILIES, *ADAPTED)
    for check in CHECKS
] + [
    pytest.param(
        family,
        check,
        id=f"{family}-{check.__name__}",
        marks=()
        if family == "qwen3_next" or (family in HYBRIDS_ON_PUSH and check is block_edges)
        else pytest.mark.nightly,
    )
    for family in HYBRIDS
    for check in HYBRID_CHECKS
]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    model = tiny_model(request.param)
    adapters.adapt(model)
    yield model
    close_planes(model)


@pytest.mark.parametrize(("model", "check"), CASES, indirect=["model"])
def test_an_embedded_pool_gives_what_eager_attention_gives(
    model: PreTrainedModel, check: Check
) -> None:
    check(model, num_device_blocks=256)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("doge", "a token sees all positions"),
        ("cpmant", "in its own code"),
        ("jamba", "passes of several tokens do not continue its running states"),
        ("llama4_text", "only full and sliding attention"),
        ("mamba", "no layer with attention"),
        ("minimax", "uses cache of its own"),
    ],
)
def test_a_family_that_is_not_served_is_refused_when_the_cache_is_made(
    family: str, message: str
) -> None:
    model = tiny_model(family)
    with pytest.raises(InvalidRequestError, match=message):
        PlaneCache(model, num_device_blocks=8)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
def test_layers_with_a_window_hold_what_it_sees(model_type: str) -> None:
    model, eager = tiny_model(model_type), tiny_model(model_type)
    model.set_attn_implementation("kvplane")
    ids = torch.randint(3, 60, (1, 60), generator=torch.Generator().manual_seed(1))
    how = {"do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40, "pad_token_id": 0}
    with PlaneCache(model, num_device_blocks=256) as cache:
        output = model.generate(ids, **{ARGUMENT: cache}, **how)
        pool = cache.get_pool()
    close_planes(model)
    held = {
        pool.layout.groups[usage.group].sliding_window_tokens: usage.num_held_blocks
        for usage in pool.usage
        if usage.tier == tpb.TIER_DEVICE
    }
    as_if_full = -(-output.shape[1] // BLOCK_SIZE)
    assert held == {0: as_if_full, 8: 2}
    assert torch.equal(output, eager.generate(ids, **how))


def test_rows_that_find_no_room_for_their_checkpoints_go_on_without() -> None:
    """There is room for 16 of 20, and a batch continues only where all of its rows do."""
    model, eager = tiny_model("qwen3_next"), tiny_model("qwen3_next")
    model.set_attn_implementation("kvplane")
    ids = torch.randint(3, 60, (20, 20), generator=torch.Generator().manual_seed(1))
    how = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
    for _ in range(2):
        with PlaneCache(model, num_device_blocks=256) as cache:
            output = model.generate(ids, **{ARGUMENT: cache}, **how)
            assert cache.num_cached_tokens == [0] * 20
    close_planes(model)
    assert torch.equal(output, eager.generate(ids, **how))


# The engine.

ENGINES_ON_PUSH = (
    "bloom", "deepseek_v3", "falcon_h1", "gemma4_text", "gpt_oss", "mimo_v2_flash", "nemotron_h",
)  # fmt: skip
"""Between them: ALiBi, latents, windows, two head sizes, sinks, KV heads that the config does not
tell, layers with attention and a running state, and layers with neither.
"""
EXACT = [name for name, row in census.documented().items() if row.verdict == census.EXACT]
PROMPTS_TOKENS = (50, 3, 50, 21)


def check_engine(model_type: str, folder: Path, control_plane: str) -> None:
    save_tiny(model_type, folder)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in PROMPTS_TOKENS]
    prompts[2] = torch.cat([prompts[0][:40], prompts[2][40:]])
    with LLM(
        folder, control_plane=control_plane, data_plane="embedded", pool_id=model_type,
        num_device_blocks=64, num_host_blocks=0, block_size_tokens=8, max_batch_tokens=24,
        num_threads=1, timeout_s=60.0,
    ) as llm:  # fmt: skip
        params = SamplingParams(max_tokens=12, ignore_eos=True, record_logits=True)
        first = llm.generate([prompt.tolist() for prompt in prompts], params)
        again = llm.generate([prompts[2].tolist()], params)
    assert again[0].num_cached_tokens >= 40
    assert again[0].outputs[0].token_ids == first[2].outputs[0].token_ids
    eager = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    for prompt, output in zip(prompts, first, strict=True):
        answer = output.outputs[0]
        ids = torch.cat([prompt, torch.tensor(answer.token_ids)])[None]
        with torch.inference_mode():
            wanted = eager(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert answer.logits is not None
        off = float((answer.logits - wanted).abs().max() / wanted.std())
        assert off < 2e-3, f"{model_type}: {off:.2g} deviations off"


@pytest.mark.parametrize("model_type", ENGINES_ON_PUSH)
def test_a_family_over_planes(model_type: str, tmp_path: Path, control_plane: str) -> None:
    check_engine(model_type, tmp_path / model_type, control_plane)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [name for name in EXACT if name not in ENGINES_ON_PUSH])
def test_every_exact_family_over_planes(
    model_type: str, tmp_path: Path, control_plane: str
) -> None:
    check_engine(model_type, tmp_path / model_type, control_plane)


@pytest.mark.parametrize("every_blocks", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_running_states_are_right_when_preempted_and_forked(
    every_blocks: int, tmp_path: Path, control_plane: str
) -> None:
    """In a pool with room for two of six sequences: also of several answers, and of beams."""
    save_tiny("qwen3_next", tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCABULARY, (1, n), generator=generator) for n in (50, 3, 50, 21)]
    how: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "record_logits": True}
    params = [SamplingParams(**how), SamplingParams(**how, n=2, temperature=1.0, seed=3)] * 2
    with LLM(
        tmp_path, control_plane=control_plane, data_plane="embedded", pool_id=f"q{every_blocks}",
        num_device_blocks=14, num_host_blocks=8, block_size_tokens=8, max_batch_tokens=24,
        num_threads=1, timeout_s=60.0, checkpoint_every_blocks=every_blocks,
    ) as llm:  # fmt: skip
        outputs = llm.generate([prompt[0].tolist() for prompt in prompts], params)
        assert llm.stats.num_recompute_preemptions > 0
        found = llm.generate(
            [prompts[3][0].tolist()], SamplingParams(max_tokens=8, ignore_eos=True, num_beams=3)
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            ids = torch.cat([prompt, torch.tensor([answer.token_ids])], dim=1)
            with torch.inference_mode():
                wanted = eager(ids, use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
            assert answer.logits is not None
            assert float((answer.logits - wanted).abs().max() / wanted.std()) < 2e-3
    beams = eager.generate(
        prompts[3], num_beams=3, max_new_tokens=8, min_new_tokens=8, do_sample=False
    )
    assert found[0].outputs[0].token_ids == beams[0, prompts[3].shape[1] :].tolist()


def test_sequences_that_find_no_room_for_a_checkpoint_go_on_without(
    tmp_path: Path, control_plane: str
) -> None:
    """Each of 20 holds one as long as it lives, and there is room for 16."""
    save_tiny("qwen3_next", tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, VOCABULARY, (1, 12), generator=generator) for _ in range(20)]
    with LLM(
        tmp_path, control_plane=control_plane, data_plane="embedded", pool_id="few",
        num_device_blocks=250, num_host_blocks=0, block_size_tokens=8, max_batch_tokens=24,
        num_threads=1, timeout_s=60.0,
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [prompt[0].tolist() for prompt in prompts],
            SamplingParams(max_tokens=60, ignore_eos=True),
        )
        assert llm.stats.num_recompute_preemptions == 0
    for prompt, output in list(zip(prompts, outputs, strict=True))[-2:]:
        wanted = eager.generate(prompt, max_new_tokens=60, min_new_tokens=60, do_sample=False)
        assert output.outputs[0].token_ids == wanted[0, 12:].tolist()
