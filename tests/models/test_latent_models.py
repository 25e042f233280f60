"""Models with multi-head latent attention keep latents, or their keys and values if asked, and give
the logits of eager attention either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import draw_weights, tiny_config, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.models.loader import PackedLinear, pack_linears
from kvplane.errors import InvalidRequestError
from kvplane.layout import KEYS_AND_VALUES, LATENT
from kvplane.models.model_layers import layer_groups
from kvplane.runtime.probe_planes import ProbePlanes
from kvplane.transformers import PlaneCache, absorbed, attention, close_planes
from kvplane.transformers.models import adapters
from kvplane.transformers.models.packed import packed_logits
from kvplane.transformers.models.probe import probe
from tests.helpers.plane_cache_checks import answer, assert_same, prompts
from tests.helpers.refusals import refused

NUM_TOKENS = 40


@pytest.fixture(
    scope="module", params=["deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.nightly)]
)
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    model = tiny_model(request.param)
    yield model
    close_planes(model)


def test_caches_of_both_kinds_share_a_model(model: PreTrainedModel) -> None:
    """Each forward pass keeps what its own planes keep, and one without planes expands as ever."""
    kinds = (True, False, True)
    ids = prompts(seed=9)
    wanted = answer(model, None, **ids)
    caches = [PlaneCache(model, num_device_blocks=256, latent=latent) for latent in kinds]
    for cache, latent in zip(caches, kinds, strict=True):
        assert_same(answer(model, cache, **ids), wanted)
        (group,) = cache.get_pool().layout.groups
        assert (group.cache_kind == LATENT) == latent
        cache.close()


def logits(model: PreTrainedModel, latent: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one sequence in three passes, and by eager attention."""
    ids = torch.randint(60, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    adapters.set_attention(model, "eager")
    with torch.inference_mode():
        wanted = model(torch.tensor([ids]), use_cache=False).logits[0]
    adapters.set_attention(model, attention.NAME)
    dtype = str(model.dtype).removeprefix("torch.")
    planes = ProbePlanes(layer_groups(model.config, latent=latent), dtype, (NUM_TOKENS,))
    rows = []
    for first, count in ((0, 20), (20, 1), (21, 19)):
        planes.begin([(0, first, count)])
        spot = range(first, first + count)
        rows.append(packed_logits(model, ids[first : first + count], spot, range(count), planes))
    return torch.cat(rows), wanted


def deepseek(**sizes: Any) -> PreTrainedModel:
    """A tiny DeepSeek V3 with other sizes."""
    attention.register()
    fields = {**tiny_config("deepseek_v3").to_dict(), **sizes}
    fields["head_dim"] = fields["qk_rope_head_dim"]
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_weights(model)
    adapters.adapt(model)
    return model


SIZES = (
    {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    {"kv_lora_rank": 16, "qk_nope_head_dim": 24, "v_head_dim": 24},
    {"q_lora_rank": None, "num_attention_heads": 16, "num_key_value_heads": 16},
    {"rope_interleave": False},
    {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
        }
    },
)  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(sizes))
def test_logits_are_those_of_eager_attention(sizes: dict[str, Any]) -> None:
    model = deepseek(**sizes)
    for latent in (True, False):
        assert bool(layer_groups(model.config, latent=latent)[0].cache_kind == LATENT) == latent
        got, wanted = logits(model, latent)
        torch.testing.assert_close(got, wanted, atol=1e-4 * float(wanted.std()), rtol=0)
        assert torch.equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_probed_and_served(dtype: torch.dtype) -> None:
    model = deepseek().to(dtype)
    probe(model)
    of_latents, of_expanded = (logits(model, latent)[0].float() for latent in (True, False))
    exact, _ = logits(model.float(), latent=True)
    off, off_expanded = (float((x - exact).abs().max()) for x in (of_latents, of_expanded))
    assert 0 < off < 2 * off_expanded


class Quantised(nn.Linear):
    """A layer whose weight is not what it multiplies with."""


def test_a_projection_that_is_no_plain_layer_is_refused_with_what_helps() -> None:
    model = deepseek()
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Quantised
    with refused(InvalidRequestError, "model", match="keep keys and values instead"):
        probe(model)
    probe(model, latent=False)


def test_packed_linear_layers_leave_the_projection_as_it_is() -> None:
    model = deepseek()
    pack_linears(model)
    kinds = [type(layer.self_attn.kv_b_proj) for layer in model.model.layers]
    assert set(kinds) == {nn.Linear}
    assert type(model.model.layers[0].self_attn.o_proj) is PackedLinear
    probe(model)


def test_a_model_that_does_not_hand_latents_on_keeps_keys_and_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as code of a checkpoint's own, which has no method that can be replaced."""
    monkeypatch.setattr(absorbed, "has_latents", lambda module: False)
    (group,) = probe(deepseek())
    assert (group.cache_kind, group.num_kv_heads, group.head_size) == (KEYS_AND_VALUES, 4, 24)
