"""Tests that only planted faults have: longer walks than on each push, and checks of models."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from kvplane.transformers import attention, close_planes
from kvplane.transformers.models import adapters
from kvplane.transformers.models.probe import probe
from tests.exhaustive.explorer import SETTINGS, explore
from tests.helpers.plane_cache_checks import (
    CHECKS,
    Check,
    block_edges,
    greedy_with_padding,
    rows_with_hits,
    tiny_llama,
)
from tests.helpers.planes.planes_machine import PlanesMachine
from tests.helpers.planes.planes_walks import walk
from tests.models.tiny_models import tiny_model


@pytest.mark.timeout(1800)
def test_planes() -> None:
    walk(PlanesMachine, range(4000))


@pytest.mark.parametrize(("scenario", "num_events"), [("order", 2), ("restarts", 3), ("fences", 5)])
def test_all_orders(scenario: str, num_events: int) -> None:
    explore(SETTINGS[scenario], num_events)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_plane_cache(check: Check) -> None:
    model = tiny_llama()
    check(model, num_device_blocks=128)
    close_planes(model)


@pytest.fixture
def latent_model() -> PreTrainedModel:
    attention.register()
    model = tiny_model("deepseek_v3")
    adapters.adapt(model)
    return model


def test_a_probe_of_latents(latent_model: PreTrainedModel) -> None:
    probe(latent_model)


def test_a_text_of_latents(latent_model: PreTrainedModel) -> None:
    greedy_with_padding(latent_model, num_device_blocks=64, probe=False)
    close_planes(latent_model)


@pytest.mark.parametrize("check", [block_edges, rows_with_hits], ids=lambda check: check.__name__)
def test_running_states(check: Check) -> None:
    model = tiny_model("qwen3_next")
    check(model, num_device_blocks=128, probe=False)
    close_planes(model)
