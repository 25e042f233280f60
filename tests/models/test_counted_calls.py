"""Models whose layers don't call attention once each: each call has a pool layer of its own."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from kvplane.errors import InvalidRequestError
from kvplane.transformers import PlaneCache, attention, close_planes
from kvplane.transformers.models import adapters, part
from kvplane.transformers.models.probe import probe
from tests.helpers.plane_cache_checks import forward, prompts, second_call, tiny_llama
from tests.models.tiny_models import tiny_model

NUM_CALLS = {"diffllama": 8, "dory": 6, "mllama": 3}
"""Of models with four layers: DiffLlama's call twice, Dory runs two of them again, and Mllama's
fourth attends to images alone.
"""


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("family", NUM_CALLS)
def test_the_pool_has_a_layer_for_each_call(
    family: str, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model is run whole, because its first layers do not tell of the others' calls."""
    attention.register()
    if is_large:
        monkeypatch.setattr(part, "_SMALL", 1000)
    model = tiny_model(family)
    for _ in range(2):
        layers = sorted(layer for group in probe(model) for layer in group.layers)
        assert layers == list(range(NUM_CALLS[family]))


@pytest.mark.parametrize("family", ["diffllama", "mllama"])
def test_generate_finds_the_keys_of_each_call(family: str) -> None:
    model = tiny_model(family)
    second_call(model, num_device_blocks=256)
    close_planes(model)


def call_twice(model: PreTrainedModel) -> None:
    layer = model.model.layers[1].self_attn
    own = layer.forward
    layer.forward = lambda *a, **k: (own(*a, **k), own(*a, **k))[1]


def test_calls_that_come_after_the_probe_are_refused() -> None:
    for is_counted in (False, True):
        model = tiny_llama()
        if is_counted:
            call_twice(model)
        with PlaneCache(model, num_device_blocks=64) as cache:
            assert attention.counts_calls(model) == is_counted
            call_twice(model)
            with pytest.raises(InvalidRequestError):
                forward(model, cache, **prompts())
            assert cache.get_seq_length() == 0
        adapters.set_attention(model, "eager")
        close_planes(model)
