"""A DeepSeek V3 over planes that are processes: the engine's program and PlaneCache give the text
of eager attention, whether the pool keeps latents or keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_planes import POOL, VOCABULARY, Pair
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

from engine.commands.main import main
from kvplane.layout import LATENT
from kvplane.transformers import PlaneCache, close_planes
from tests.helpers.plane_cache_checks import ARGUMENT
from tests.helpers.programs import run
from tests.models.tiny_models import draw_weights, tiny_config

PROMPT = "one two three four five six seven eight nine ten eleven twelve"
NUM_NEW = 24
BYTES_OF_LATENTS = 4 * (32 + 8) * 4  # layers, numbers, bytes of each
BYTES_OF_KEYS_AND_VALUES = 4 * 4 * (24 + 16) * 4  # layers, heads, numbers, bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random byte-level model in which attention matters, and which writes letters alone."""
    folder = tmp_path_factory.mktemp("deepseek")
    config = AutoConfig.for_model(
        **{**tiny_config("deepseek_v3").to_dict(), "vocab_size": VOCABULARY, "eos_token_id": 1}
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    draw_weights(model)
    letters = torch.zeros(VOCABULARY, 1)
    letters[3 + ord("a") : 3 + ord("z") + 1] = 1.0
    with torch.no_grad():
        model.lm_head.weight.mul_(letters)
    model.save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return folder


@pytest.fixture(params=["latent", pytest.param("no-latent", marks=pytest.mark.nightly)])
def pair(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[Pair]:
    with Pair(folder, tmp_path, arguments=(f"--{request.param}",)) as pair:
        yield pair


def generate(model: Any, tokenizer: Any, **how: Any) -> str:
    ids = tokenizer(PROMPT, add_special_tokens=False, return_tensors="pt").input_ids
    output = model.generate(ids, do_sample=False, max_new_tokens=NUM_NEW, pad_token_id=0, **how)
    return str(tokenizer.decode(output[0, ids.shape[1] :]))


def test_both_ways_in_give_the_text_of_eager_attention(folder: Path, pair: Pair) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    wanted = generate(model, tokenizer)
    assert len(set(wanted)) > 5
    model.set_attn_implementation("kvplane")
    with PlaneCache(model, control_plane=pair.control.address, pool_id=POOL) as cache:
        assert generate(model, tokenizer, **{ARGUMENT: cache}) == wanted
        (group,) = cache.get_pool().layout.groups
    close_planes(model)
    is_latent = group.cache_kind == LATENT
    assert group.num_kv_heads == (1 if is_latent else 4)
    done = run(
        *("engine", "generate", "--model", str(folder)),
        *("--control-plane", pair.control.address, "--pool-id", POOL, "--prompt", PROMPT),
        *("--max-tokens", str(NUM_NEW), "--num-threads", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == wanted


def test_the_layout_says_what_a_token_takes_either_way(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", "--model", str(folder)]) == 0
    both = capsys.readouterr()
    assert f"{BYTES_OF_LATENTS:,} bytes in latents" in both.err
    assert f"{BYTES_OF_KEYS_AND_VALUES:,} in keys and values" in both.err
    assert '"cache_kind": "latent"' in both.out
    assert main(["layout", "--model", str(folder), "--no-latent"]) == 0
    one = capsys.readouterr()
    assert f"{BYTES_OF_KEYS_AND_VALUES:,} bytes" in one.err
    assert '"cache_kind": "keys_and_values"' in one.out
