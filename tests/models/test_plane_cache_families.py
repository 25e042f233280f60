"""``model.generate()`` on a PlaneCache gives what it gives with eager attention: 14 families, and
three whose own attention is adapted.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_models import tiny_model
from transformers import PreTrainedModel

from kvplane.errors import InvalidRequestError
from kvplane.transformers import PlaneCache, close_planes
from kvplane.transformers.models import adapters
from tests.helpers.plane_cache_checks import CHECKS, Check, greedy_with_padding

FAMILIES = (
    "deepseek_v3", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "gpt2", "gpt_oss", "llama",
    "mistral", "mixtral", "olmo3", "opt", "phi3", "qwen3",
)  # fmt: skip
ADAPTED = ("bloom", "falcon", "mpt")
WHOLE = ("bloom", "deepseek_v3", "gemma3_text", "gpt_oss", "llama")
"""Checked in all ways on each push, the others in one."""
CASES = [
    pytest.param(
        family,
        check,
        id=f"{family}-{check.__name__}",
        marks=() if family in WHOLE or check is greedy_with_padding else pytest.mark.nightly,
    )
    for family in (*FAMILIES, *ADAPTED)
    for check in CHECKS
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
        ("diffllama", "attention twice|gives other logits"),
        ("gpt_neo", "in its own code"),
        ("mamba", "only full and sliding attention"),
    ],
)
def test_a_family_that_is_not_served_is_refused_when_the_cache_is_made(
    family: str, message: str
) -> None:
    model = tiny_model(family)
    with pytest.raises(InvalidRequestError, match=message):
        PlaneCache(model, num_device_blocks=8)
    assert model.config._attn_implementation == "eager"
