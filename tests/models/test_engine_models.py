"""The engine over real planes gives each exact family's own logits: packed, chunked, cached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from tests.models.test_census import documented
from tests.models.tiny_models import VOCABULARY, save_tiny

ON_PUSH = ("bloom", "deepseek_v3", "gemma4_text", "gpt_oss", "mimo_v2_flash")
"""Between them: ALiBi, latents, windows, two head sizes, sinks, and KV heads that the config does
not tell.
"""
EXACT = [name for name, row in documented().items() if row.split(" | ")[1] == "exact"]
PROMPTS_TOKENS = (50, 3, 50, 21)


def check(model_type: str, folder: Path, control_plane: str) -> None:
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


@pytest.mark.parametrize("model_type", ON_PUSH)
def test_a_family_over_planes(model_type: str, tmp_path: Path, control_plane: str) -> None:
    check(model_type, tmp_path / model_type, control_plane)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [name for name in EXACT if name not in ON_PUSH])
def test_every_exact_family_over_planes(
    model_type: str, tmp_path: Path, control_plane: str
) -> None:
    check(model_type, tmp_path / model_type, control_plane)
