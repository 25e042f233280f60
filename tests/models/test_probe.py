"""The probe lets through what is exact, and refuses by its reason what is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from kvplane.errors import InvalidRequestError
from kvplane.models.model_layers import layer_groups
from kvplane.transformers import attention
from kvplane.transformers.models import adapters, part
from kvplane.transformers.models.probe import Recorder, probe
from tests.models.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def _registered() -> None:
    attention.register()


def bias(model: PreTrainedModel) -> None:
    """A part of attention that no option expresses: scores grow with the key's position."""
    for layer in model.model.layers:
        own = layer.self_attn.forward

        def forward(*arguments: Any, own: Any = own, **named: Any) -> Any:
            mask = named.get("attention_mask")
            if mask is not None:
                named["attention_mask"] = mask + torch.arange(mask.shape[-1]) * 0.3
            return own(*arguments, **named)

        layer.self_attn.forward = forward


def state(model: PreTrainedModel) -> None:
    """A layer that mixes each token with the one before it in the row."""
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda hidden: own(hidden + hidden.roll(1, 1) * (hidden.shape[1] > 1))


def window(model: PreTrainedModel) -> None:
    """Asks for another window in the call than in the mask."""
    for layer in model.model.layers[::2]:
        layer.self_attn.sliding_window = 3


def fails(model: PreTrainedModel) -> None:
    """Reads the mask, which is none with "kvplane"."""
    layer = model.model.layers[0].self_attn
    own = layer.forward
    layer.forward = lambda *a, **k: (k["attention_mask"].shape, own(*a, **k))[1]


def nan(model: PreTrainedModel) -> None:
    """Has a weight that is no number, as a damaged file leaves."""
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("llama", nan, "gives NaN or infinity with transformers' own attention"),
        ("llama", bias, "a part that kvplane's options do not express"),
        ("llama", state, "state besides keys and values"),
        ("llama", fails, "fails on two sequences in one row: AttributeError"),
        ("gemma3_text", window, "a part that kvplane's options do not express"),
    ],
)
def test_a_model_that_differs_is_refused_by_its_reason(
    family: str, change: Callable[[PreTrainedModel], None], reason: str
) -> None:
    model = tiny_model(family)
    if family == "llama":
        model = small_llama()
    probe(model)
    change(model)
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        probe(model)
    assert caught.value.field == "model"
    assert repr(family) in caught.value.message


def test_falcon_with_alibi_is_compared_with_the_attention_that_adds_it_once() -> None:
    model = AutoModelForCausalLM.from_config(
        FalconConfig(
            vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, alibi=True,
            multi_query=False, new_decoder_architecture=False,
        )
    ).eval()  # fmt: skip
    adapters.adapt(model)
    probe(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["bloom", "gpt_neo", "gpt_neox_japanese", "rembert", "trocr"])
def test_models_with_attention_of_their_own_are_adapted(family: str, dtype: torch.dtype) -> None:
    """In half precision the probe runs a copy, whose weights are of another type."""
    model = tiny_model(family).to(dtype)
    adapters.adapt(model)
    probe(model)
    assert adapters.is_adapted(model)


def test_an_adapted_decoder_refuses_an_encoders_states() -> None:
    model = tiny_model("trocr")
    adapters.adapt(model)
    adapters.set_attention(model, attention.NAME)
    ids, states = (
        torch.tensor([[5, 6]]),
        torch.zeros(1, 3, 64),
    )
    with (
        torch.no_grad(),
        attention.running(Recorder([]), model),
        pytest.raises(InvalidRequestError, match="encoder's states"),
    ):
        model(ids, encoder_hidden_states=states, use_cache=False)


def other_heads(model: PreTrainedModel) -> None:
    model.config.num_key_value_heads = 4


def other_window(model: PreTrainedModel) -> None:
    model.config.sliding_window = 6


@pytest.mark.parametrize("change", [other_heads, other_window])
@pytest.mark.parametrize("is_large", [False, True])
def test_what_layers_give_counts_where_the_config_says_otherwise(
    change: Callable[[PreTrainedModel], None], is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_llama()
    wanted = layer_groups(model.config)
    change(model)
    assert layer_groups(model.config) != wanted
    if is_large:
        monkeypatch.setattr(part, "_SMALL", 1000)
    assert probe(model) == wanted


def small_llama(num_layers: int = 4, hidden_size: int = 64, dtype: Any = None) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    return model if dtype is None else model.to(dtype)


def layers_probed(model: PreTrainedModel) -> set[int]:
    """Probe a model; return the layers that were run."""
    called: set[int] = set()
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: called.add(index))
    probe(model)
    return called


def test_a_large_model_is_probed_by_its_first_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "_SMALL", 1000)
    model = small_llama(num_layers=6)
    assert layers_probed(model) == {0, 1}
    assert len(model.model.layers) == 6


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_of_each_precision_are_probed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_large: bool
) -> None:
    """Small ones in single precision, large ones in their own."""
    if is_large:
        monkeypatch.setattr(part, "_SMALL", 1000)
    model = small_llama(dtype=dtype)
    probe(model)
    assert model.dtype is dtype
    bias(model)
    with pytest.raises(InvalidRequestError):
        probe(model)


def test_layers_of_each_kind_are_among_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "_SMALL", 1000)
    model = tiny_model("gemma3_text")
    kinds = model.config.layer_types
    assert {kinds[i] for i in layers_probed(model)} == set(kinds)


def test_windows_are_as_before_whatever_happens() -> None:
    model = tiny_model("gemma3_text")
    model.config.sliding_window = 4096
    for layer in model.model.layers[::2]:
        layer.self_attn.sliding_window = 4096
    probe(model)
    window(model)
    with pytest.raises(InvalidRequestError):
        probe(model)
    assert model.config.sliding_window == 4096
    assert model.config._attn_implementation == attention.NAME


def test_a_small_model_is_probed_within_a_second() -> None:
    model = small_llama(num_layers=8, hidden_size=512)
    probe(model)  # first calls load what is loaded once
    durations_s = []
    for _ in range(3):
        started_s = time.perf_counter()
        probe(model)
        durations_s.append(time.perf_counter() - started_s)
    assert min(durations_s) < 1.0
