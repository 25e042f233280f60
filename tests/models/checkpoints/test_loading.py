"""Weights and settings as people have them: precisions, shards, ties, ends, templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from engine.models import loader
from kvplane.errors import InvalidRequestError
from kvplane.models.hf import layout_from_hf
from tests.helpers.refusals import refused
from tests.models import census
from tests.models.tiny_models import VOCABULARY, tiny_model


def save(folder: Path, family: str = "llama", dtype: Any = torch.float32, **how: Any) -> Path:
    tiny_model(family).to(dtype).save_pretrained(folder, **how)
    return folder


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_weights_of_any_precision_are_loaded_in_the_one_asked_for(
    tmp_path: Path, stored: torch.dtype, asked: str
) -> None:
    loaded = loader.load(save(tmp_path / "m", dtype=stored), asked, probe=False)
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, asked)}


def test_experts_in_mxfp4_are_unpacked(tmp_path: Path) -> None:
    """As gpt-oss is published, loaded where there is no kernel for it."""
    folder = save(tmp_path / "m", "gpt_oss", torch.bfloat16)
    packed = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = value.shape
            shape = (experts, outer, inner // 32)
            packed[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            packed[f"{name}_scales"] = torch.full(shape, 124, dtype=torch.uint8)
        else:
            packed[name] = value
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "dequantize": True}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = loader.load(folder, "float32")
    assert census.check_exact(loaded.model, loaded.groups) == ["sliding window", "sinks"]


def test_tied_embeddings_stay_one_tensor(tmp_path: Path) -> None:
    loaded: Any = loader.load(save(tmp_path / "m", "gemma"), "bfloat16").model
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_ends_and_repetition_penalty_are_the_generation_configs(tmp_path: Path) -> None:
    folder = save(tmp_path / "m")
    plain = loader.load(folder, "float32")
    assert (plain.end_token_ids, plain.repetition_penalty) == (frozenset([2]), 1.0)
    GenerationConfig(eos_token_id=[5, 7], repetition_penalty=1.3).save_pretrained(folder)
    own = loader.load(folder, "float32")
    assert (own.end_token_ids, own.repetition_penalty) == (frozenset([5, 7]), 1.3)


def with_tokenizer(folder: Path, template: str | None) -> Path:
    words = {"<unk>": 0, "user": 1, "assistant": 2, "hello": 3, "world": 4, ":": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def test_a_conversation_is_written_by_the_models_template(tmp_path: Path) -> None:
    loaded = loader.load(with_tokenizer(save(tmp_path / "m"), TEMPLATE), "float32")
    messages = [{"role": "user", "content": "hello world"}]
    assert loaded.encode_chat(messages, field="messages") == [1, 5, 3, 4, 2, 5]


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_what_a_template_refuses_is_named(tmp_path: Path, template: str | None) -> None:
    loaded = loader.load(with_tokenizer(save(tmp_path / "m"), template), "float32", probe=False)
    with refused(InvalidRequestError, "messages", match="chat template"):
        loaded.encode_chat([{"role": "tool", "content": "x"}], field="messages")


def test_without_a_tokenizer_there_are_no_texts(tmp_path: Path) -> None:
    loaded = loader.load(save(tmp_path / "m"), "float32", probe=False)
    conversation = [{"role": "user", "content": "x"}]
    for encode, given in ((loaded.encode_chat, conversation), (loaded.encode, "text")):
        with refused(InvalidRequestError, "prompts[3]", match="has no tokenizer"):
            encode(given, field="prompts[3]")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "llava_of_tomorrow"}, "cannot load it: ValueError"),
        ({"num_attention_heads": 3}, "refused by transformers"),
        ({"hidden_act": "no_such"}, "cannot load it: KeyError"),
    ],
)
def test_what_transformers_cannot_load_is_refused_with_its_reason(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    folder = save(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InvalidRequestError, match=reason):
        loader.load(folder, "float32")


def test_a_model_that_the_probe_refuses_loads_only_without_it(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "cpmant")
    with pytest.raises(InvalidRequestError, match="in its own code"):
        loader.load(folder, "float32")
    assert loader.load(folder, "float32", probe=False).vocabulary_size == VOCABULARY


def test_a_model_without_a_table_of_positions_has_no_limit(tmp_path: Path) -> None:
    assert loader.load(save(tmp_path / "a"), "float32").max_total_tokens == 128
    bloom = loader.load(save(tmp_path / "b", "bloom"), "float32")
    assert bloom.max_total_tokens == loader.NO_LIMIT


def test_scales_go_to_the_layers_of_their_group(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "gemma4_text")
    scales = {
        f"model.layers.{i}.self_attn.{kind}_scale": torch.tensor(float(10 * (kind == "v") + i + 1))
        for i in range(4)
        for kind in "kv"
    }
    save_file(scales, folder / "scales.safetensors")
    groups = layout_from_hf(folder, kv_dtype="float8_e4m3fn").groups
    assert len(groups) == 2
    for group in groups:
        assert group.key_scales == tuple(float(layer + 1) for layer in group.layers)
        assert group.value_scales == tuple(float(layer + 11) for layer in group.layers)
