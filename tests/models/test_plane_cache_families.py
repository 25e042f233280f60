"""``model.generate()`` on a PlaneCache gives what it gives with eager attention: 13 families."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from plane_cache_checks import CHECKS, Check
from tiny_models import tiny_model
from transformers import PreTrainedModel

from kvplane.transformers import close_planes

FAMILIES = (
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "glm4_moe",
    "gpt2",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmo3",
    "opt",
    "phi3",
    "qwen3",
)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    model = tiny_model(request.param)
    yield model
    close_planes(model)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_embedded_pool_gives_what_eager_attention_gives(
    model: PreTrainedModel, check: Check
) -> None:
    check(model, num_device_blocks=256)
