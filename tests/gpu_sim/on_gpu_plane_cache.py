"""Models on a GPU, whose keys and values are in a pool of their own process.

test_simulated_gpu.py names this file to pytest, which does not collect it by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from kvplane.transformers import PlaneCache, close_planes
from tests.helpers import plane_cache_checks as checks


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    model = checks.tiny_llama()
    yield model
    close_planes(model)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_a_model_on_a_gpu_gives_the_text_of_transformers(
    model: PreTrainedModel, check: checks.Check
) -> None:
    check(model.to("cuda"), num_device_blocks=128)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_pool_is_on_the_models_device(model: PreTrainedModel, device: str) -> None:
    with PlaneCache(model.to(device), num_device_blocks=16) as cache:
        assert cache._planes.backend._executor.device.type == device
