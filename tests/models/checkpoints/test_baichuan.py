"""Baichuan's own checkpoint formats against what their papers and code say, in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models import loader
from engine.models.baichuan import alibi_slopes
from kvplane.errors import InvalidRequestError
from kvplane.models.hf import layout_from_hf
from kvplane.transformers import attention
from tests.helpers.refusals import refused
from tests.models import census

HIDDEN, LAYERS, VOCABULARY, INNER = 64, 3, census.VOCABULARY, 96
COMMON = {
    "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "hidden_act": "silu",
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "7B": {"num_attention_heads": 4, "max_position_embeddings": 128},
    "13B": {"num_attention_heads": 5, "hidden_size": 80, "model_max_length": 128},
    "2-7B": {"num_attention_heads": 4, "max_position_embeddings": 128, "model_max_length": 128,
             "z_loss_weight": 0},
    "2-13B": {"num_attention_heads": 4, "model_max_length": 128, "z_loss_weight": 0},
}  # fmt: skip


def weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = config["hidden_size"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    vocabulary = config["vocab_size"]
    made = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "model.norm.weight": norm()}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        made |= {
            f"{at}input_layernorm.weight": norm(),
            f"{at}post_attention_layernorm.weight": norm(),
            f"{at}self_attn.W_pack.weight": matrix(3 * hidden, hidden, 1.5),
            f"{at}self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{at}mlp.gate_proj.weight": matrix(INNER, hidden),
            f"{at}mlp.up_proj.weight": matrix(INNER, hidden),
            f"{at}mlp.down_proj.weight": matrix(hidden, INNER),
        }
        if "max_position_embeddings" in config:
            made[f"{at}self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    return made | {"lm_head.weight": 3 * matrix(vocabulary, hidden)}


def write(
    folder: Path, kind: str, form: str, vocabulary: int = VOCABULARY
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = {**COMMON, **KINDS[kind], "vocab_size": vocabulary}
    stored = weights(config)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(stored)
    halves = (
        {name: stored[name] for name in names[::2]},
        {name: stored[name] for name in names[1::2]},
    )
    for i, half in enumerate(halves):
        if form == "safetensors":
            save_file(half, folder / f"model-{i + 1:05}-of-00002.safetensors")
        else:
            torch.save(half, folder / f"pytorch_model-{i + 1:05}-of-00002.bin")
    return config, stored


def reference(
    config: dict[str, Any], stored: dict[str, torch.Tensor], tokens: list[int]
) -> torch.Tensor:
    """Logits [T, vocabulary] in float64, by the equations alone."""
    w = {name: value.double() for name, value in stored.items()}
    num_heads, length = config["num_attention_heads"], len(tokens)
    size = config["hidden_size"] // num_heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[name]

    positions = torch.arange(length, dtype=torch.float64)
    bias = torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)
    hidden = w["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        packed = norm(hidden, f"{at}input_layernorm.weight") @ w[f"{at}self_attn.W_pack.weight"].T
        q, k, v = packed.view(length, 3, num_heads, size).permute(1, 2, 0, 3)
        if "max_position_embeddings" in config:
            angles = positions[:, None] * 10_000 ** (-torch.arange(0, size, 2) / size).double()
            turn = torch.polar(torch.ones_like(angles), angles)
            q, k = (
                torch.cat([turned.real, turned.imag], -1)
                for turned in (torch.complex(*x.chunk(2, -1)) * turn for x in (q, k))
            )
            scores = q @ k.transpose(1, 2) / size**0.5
        else:
            slopes = torch.tensor(
                [[2 ** (-2.0), 2 ** (-4.0), 2 ** (-6.0), 2 ** (-8.0), 2 ** (-1.0)][h]
                 for h in range(num_heads)], dtype=torch.float64,
            )  # fmt: skip
            away = positions[None, :] - positions[:, None]
            scores = q @ k.transpose(1, 2) / size**0.5 + slopes[:, None, None] * away
        out = ((scores + bias).softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        hidden = hidden + out @ w[f"{at}self_attn.o_proj.weight"].T
        x = norm(hidden, f"{at}post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(x @ w[f"{at}mlp.gate_proj.weight"].T)
        inner = gate * (x @ w[f"{at}mlp.up_proj.weight"].T)
        hidden = hidden + inner @ w[f"{at}mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    if "z_loss_weight" in config:
        head = head / head.norm(dim=1, keepdim=True)
    return norm(hidden, "model.norm.weight") @ head.T


@pytest.mark.parametrize(
    ("kind", "form"), [("7B", "safetensors"), *((kind, "bin") for kind in KINDS)]
)
def test_a_checkpoint_gives_the_logits_of_its_equations(
    tmp_path: Path, kind: str, form: str
) -> None:
    config, stored = write(tmp_path / "baichuan", kind, form)
    loaded = loader.load(tmp_path / "baichuan", "float32")
    model: Any = loaded.model
    assert census.check_exact(model, loaded.groups) == (["ALiBi"] if "13B" in kind else [])
    tokens = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = reference(config, stored, tokens)
    model.config._attn_implementation = "eager"
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert float((logits - wanted).abs().max() / wanted.std()) < 1e-4


def test_the_layout_needs_no_code_of_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "baichuan", "13B", "bin")
    group = layout_from_hf(tmp_path / "baichuan").groups[0]
    assert (group.num_kv_heads, group.head_size, len(group.layers)) == (5, 16, LAYERS)


def test_other_weights_have_another_model_id(tmp_path: Path) -> None:
    write(tmp_path / "baichuan", "7B", "bin")
    before = layout_from_hf(tmp_path / "baichuan").model_id
    torch.save({"x": torch.ones(1)}, tmp_path / "baichuan" / "pytorch_model-00002-of-00002.bin")
    assert layout_from_hf(tmp_path / "baichuan").model_id != before


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    write(tmp_path / "baichuan", "7B", "bin")
    (tmp_path / "baichuan" / "pytorch_model-00002-of-00002.bin").unlink()
    with refused(InvalidRequestError, "checkpoint", match="lacks weights"):
        loader.load(tmp_path / "baichuan", "float32")
    (tmp_path / "baichuan" / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(InvalidRequestError, match="holds no weights"):
        loader.load(tmp_path / "baichuan", "float32")


@pytest.mark.parametrize("num_heads", [1, 2, 8, 12, 32, 40])
def test_slopes_are_those_of_the_paper(num_heads: int) -> None:
    slopes = alibi_slopes(num_heads)
    n = 2 ** int(math.log2(num_heads))
    assert torch.allclose(slopes[:n], torch.tensor([2 ** (-8 / n * (i + 1)) for i in range(n)]))
    if num_heads > n:  # as for 2n heads, every second one
        assert torch.allclose(slopes[n:], alibi_slopes(2 * n)[::2][: num_heads - n])


def test_attention_is_left_as_kvplanes(tmp_path: Path) -> None:
    write(tmp_path / "baichuan", "13B", "bin")
    model = loader.load(tmp_path / "baichuan", "bfloat16", probe=False).model
    assert model.config._attn_implementation == attention.NAME
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
