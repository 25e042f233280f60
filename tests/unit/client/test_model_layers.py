"""A model's layer groups, from its config alone."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from kvplane.errors import InvalidRequestError
from kvplane.layout import LayerGroup
from kvplane.models.model_layers import has_states, layer_groups
from tests.helpers.refusals import refused


def groups(model_type: str, **fields: Any) -> list[tuple[str, int, int, int, int, int]]:
    return [
        (g.name, len(g.layers), g.num_kv_heads, g.head_size, g.value_size, g.sliding_window_tokens)
        for g in layer_groups(AutoConfig.for_model(model_type, **fields))
    ]


@pytest.mark.parametrize(
    ("model_type", "wanted"),
    [
        ("llama", [("full", 32, 32, 128, 128, 0)]),
        ("gpt2", [("full", 12, 12, 64, 64, 0)]),  # n_head, n_layer, n_embd
        ("gpt_bigcode", [("full", 12, 1, 64, 64, 0)]),  # multi_query
        ("mpt", [("full", 24, 16, 128, 128, 0)]),  # n_heads, n_layers, d_model
        ("mistral", [("window-4096", 32, 8, 128, 128, 4096)]),  # no types: every layer
        ("gemma3_text", [("window-4096", 22, 4, 256, 256, 4096), ("full", 4, 4, 256, 256, 0)]),
        ("gemma3", [("window-4096", 22, 4, 256, 256, 4096), ("full", 4, 4, 256, 256, 0)]),
        ("gemma4_text", [("window-512", 25, 4, 256, 256, 512), ("full", 5, 4, 512, 512, 0)]),
        ("deepseek_v3", [("latent", 61, 1, 576, 512, 0)]),
        ("deepseek_v2", [("latent", 32, 1, 576, 512, 0)]),
        ("kimi_k25", [("latent", 61, 1, 576, 512, 0)]),
        ("glm4_moe_lite", [("latent", 47, 1, 576, 512, 0)]),
        ("minicpm3", [("latent", 62, 1, 288, 256, 0)]),
        ("qwen2", [("full", 32, 32, 128, 128, 0)]),  # a window in its config that is turned off
    ],
)
def test_groups_of_a_types_defaults(model_type: str, wanted: list[Any]) -> None:
    assert groups(model_type) == wanted


def test_latents_may_be_left_expanded_and_are_where_no_kernel_has_their_size() -> None:
    expanded = LayerGroup("full", (0, 1), 4, 192, value_head_size=128)
    for latent, sizes in (
        (False, {}),
        (True, {"kv_lora_rank": 520}),
        (True, {"kv_lora_rank": 36}),
    ):
        config = AutoConfig.for_model(
            "deepseek_v3",
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            **sizes,
        )
        assert layer_groups(config, latent=latent) == (expanded,)


def test_falcon_has_one_head_eight_or_all() -> None:
    assert groups("falcon")[0][2] == 1
    assert groups("falcon", new_decoder_architecture=True, num_kv_heads=8,
                  num_attention_heads=64, hidden_size=4096)[0][2] == 8  # fmt: skip
    assert groups("falcon", multi_query=False)[0][2] == 71


def test_layers_keep_their_numbers() -> None:
    config = AutoConfig.for_model(
        "gemma3_text", num_hidden_layers=3, sliding_window=32, layer_types=[
            "sliding_attention", "full_attention", "sliding_attention"
        ],
    )  # fmt: skip
    assert layer_groups(config) == (
        LayerGroup("window-32", (0, 2), 4, 256, 32),
        LayerGroup("full", (1,), 4, 256),
    )


def test_groups_of_one_window_are_named_by_their_sizes() -> None:
    per_layer = {1: {"head_dim": 64}}
    config = AutoConfig.for_model("llama", num_hidden_layers=2, per_layer_config=per_layer)
    assert [group.name for group in layer_groups(config)] == ["full-32x128", "full-32x64"]


@pytest.mark.parametrize("model_type", ["llama4_text", "deepseek_v32"])
def test_layers_with_other_state_are_refused_by_their_type(model_type: str) -> None:
    with refused(InvalidRequestError, "config.layer_types", match="is of type"):
        groups(model_type)


@pytest.mark.parametrize(
    ("types", "attending"),
    [
        (["linear_attention", "full_attention", "conv"], (1,)),
        (["hybrid", "moe", "hybrid"], (0, 2)),
        (["mlp", "linear_attention", "sliding_attention"], (2,)),
    ],
)
def test_layers_with_states_attend_or_do_not(types: list[str], attending: tuple[int, ...]) -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=3)
    config.layer_types = types
    assert [group.layers for group in layer_groups(config)] == [attending]
    assert has_states(config)


def test_states_without_attention_are_refused() -> None:
    with refused(InvalidRequestError, "config.layer_types", match="no layer with attention"):
        groups("mamba")
