"""Models that torch.compile has compiled: the same tokens on a PlaneCache, from few graphs that no
layer breaks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from compiled_graphs import Graphs
from tiny_models import tiny_model
from transformers import PreTrainedModel

from kvplane.transformers import PlaneCache, close_planes
from tests.helpers.plane_cache_checks import answer, assert_same, prompts

POOL = {"num_device_blocks": 256}
MAX_GRAPHS = 3
"""One of a prompt, one of a token after it, and one of a prompt whose length is left open."""


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Forget code of other tests: torch bounds what it compiles of one function."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def two_layers(family: str) -> PreTrainedModel:
    """A tiny model of fewer layers, as each of them takes a second to trace."""
    model = tiny_model(family)
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:2]
    return model


def check_generate(model: PreTrainedModel, plain: PreTrainedModel, num_new: int) -> None:
    """Two batches with padding, of ``num_new`` tokens and of few, the second of another length."""
    with PlaneCache(model, **POOL) as cache:
        for batch, num in ((prompts(), num_new), (prompts(num_columns=33), 3)):
            how = {"max_new_tokens": num, "min_new_tokens": num, **batch}
            assert_same(answer(model, cache, **how), answer(plain, None, **how))
            cache.reset()
    close_planes(model)


AT_NIGHT = [pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen3", "gpt_oss")]


@pytest.mark.parametrize("family", ["llama", *AT_NIGHT])
def test_a_compiled_model_generates_the_same_from_few_graphs(family: str) -> None:
    """gpt_oss: windows in every other layer, and sinks."""
    model, graphs = two_layers(family), Graphs()
    model.forward = torch.compile(model.forward, backend=graphs, fullgraph=True)
    check_generate(model, two_layers(family), 64)
    assert graphs.num <= MAX_GRAPHS


def test_no_graph_breaks_in_a_decoder_layer() -> None:
    model, graphs = two_layers("llama"), Graphs()
    for layer in model.model.layers:
        layer.compile(backend=graphs, fullgraph=True)
    check_generate(model, two_layers("llama"), 4)
    assert 0 < graphs.num <= 2 * MAX_GRAPHS


INDUCTOR = (
    "bloom", "deepseek_v3", "falcon", "gemma2", "gemma3n_text", "gpt_oss", "llama", "mpt", "qwen3",
)  # fmt: skip
"""Between them: ALiBi, latents, windows, soft caps, sinks, and keys that layers share."""


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", INDUCTOR)
def test_code_that_inductor_has_made_generates_the_same(family: str) -> None:
    model = tiny_model(family)
    model.forward = torch.compile(model.forward, fullgraph=True)
    check_generate(model, tiny_model(family), 12)
