"""A prefix is found by what computes it: by the same weights, settings and layers, and no others.

Each row has two states A and B of a model. Answers are compared with those of eager attention.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from plane_cache_checks import ARGUMENT, ATOL, one_prompt, tiny_llama
from transformers import PreTrainedModel

from kvplane import LayerGroup, Layout
from kvplane.errors import InvalidRequestError
from kvplane.transformers import PlaneCache, close_planes
from kvplane.transformers.model_state import namespace_of
from tests.e2e.engine_planes import ROOT, Process
from tests.models import model_states as states
from tests.models.model_states import LLAMA, OTHERS, ask

POOL = {"num_device_blocks": 64}
FOUND = 32  # of 45 tokens, all whole blocks


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    model = tiny_llama()
    yield model
    close_planes(model)


@pytest.mark.parametrize("row", [*LLAMA, "soft cap"])
def test_one_state_never_finds_what_another_left(row: str) -> None:
    """In one process and one pool: A, A again, B, B again."""
    model, change = states.made(row)
    results = [ask(model, **POOL), ask(model, **POOL)]
    change(model)
    results += [ask(model, **POOL), ask(model, **POOL)]
    with PlaneCache(model, **POOL) as cache:
        cache._planes.backend._executor.check_integrity()  # type: ignore[union-attr]
    close_planes(model)
    assert [found for found, _ in results] == [0, FOUND, 0, FOUND]
    assert max(off for _, off in results) < ATOL


def test_states_that_come_back_find_what_they_left(model: PreTrainedModel) -> None:
    assert ask(model, **POOL)[0] == 0
    for scale, found in ((0.5, 0), (2.0, FOUND), (0.5, FOUND)):  # A, then B, A and B again
        for layer in model.model.layers:
            layer.self_attn.scaling *= scale
        got = ask(model, **POOL)
        assert got[0] == found and got[1] < ATOL


def test_two_processes_share_what_equal_states_compute_and_nothing_else(tmp_path: Path) -> None:
    group = LayerGroup("full", (0, 1, 2), 2, 16)
    layout = Layout(states.MODEL_ID, 16, "float32", "float32", (group,))
    (tmp_path / "layout.json").write_text(json.dumps(asdict(layout)))
    control = Process("control_plane", tmp_path / "control.log").start()
    flags = ["--layout", str(tmp_path / "layout.json"), "--num-device-blocks", "256"]
    to_control = ["--control-plane", control.address]
    data = Process("data_plane", tmp_path / "data.log", *to_control, *flags).start()
    rows = [row for row in LLAMA if row not in ("weights that are assigned", "an optimizer's step")]
    asked = ["weights.A", *(f"{row}.B" for row in rows)]
    found = []
    try:
        for _ in range(2):
            program = [sys.executable, "-m", "tests.models.model_states", control.address, *asked]
            printed = subprocess.run(
                program, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                check=True, capture_output=True, text=True, timeout=200,
            ).stdout  # fmt: skip
            results = json.loads(printed.splitlines()[-1])
            found.append([num for num, _ in results])
            assert max(off for _, off in results) < ATOL
    finally:
        data.stop()
        control.stop()
    assert found == [[0] * len(asked), [FOUND] * len(asked)]


def test_another_dtype_is_another_pool_or_is_refused(model: PreTrainedModel) -> None:
    """The layout of a pool has its dtype, and one model's planes are of one layout."""
    assert ask(model, **POOL)[0] == 0
    OTHERS["dtype"][1](model)
    with pytest.raises(InvalidRequestError):
        ask(model, **POOL)


def test_sequences_of_other_weights_are_not_gone_on_with(model: PreTrainedModel) -> None:
    ids = one_prompt()["input_ids"]
    model.set_attn_implementation("kvplane")
    with PlaneCache(model, **POOL) as cache, torch.no_grad():
        model(ids, **{ARGUMENT: cache})
        LLAMA["weights"](model)
        with pytest.raises(InvalidRequestError, match="other weights, adapters or set") as caught:
            model(torch.tensor([[7]]), **{ARGUMENT: cache})
        assert caught.value.field == "cache"
        cache.reset()
        assert sum(tier.num_held_blocks for tier in cache.describe_pool().usage.tiers) == 0
    assert ask(model, **POOL)[1] < ATOL


def test_a_write_through_data_is_told(model: PreTrainedModel) -> None:
    """Nothing shows it, so the documents name the way out."""
    weight = model.model.layers[0].self_attn.k_proj.weight
    assert ask(model, **POOL)[0] == 0
    weight.data.mul_(1.5)
    with PlaneCache(model, **POOL) as cache:
        cache.weights_changed()
    assert ask(model, **POOL)[0] == 0
    found, off = ask(model, **POOL)
    assert found == FOUND and off < ATOL


def test_weights_without_versions_need_a_namespace() -> None:
    with torch.inference_mode():
        model = tiny_llama()
    with pytest.raises(InvalidRequestError, match="was made in inference mode") as caught:
        PlaneCache(model, **POOL, probe=False)
    assert caught.value.field == "namespace"
    with torch.inference_mode():
        given = {**POOL, "namespace": "mine", "probe": False}
        assert [ask(model, **given)[0] for _ in range(2)] == [0, FOUND]
    close_planes(model)


def test_a_namespace_that_is_given_is_taken_as_it_is(model: PreTrainedModel) -> None:
    given = {**POOL, "namespace": "mine"}
    assert ask(model, **given)[0] == 0
    model.config.pad_token_id = 3
    assert ask(model, **given)[0] == FOUND
    with pytest.raises(InvalidRequestError) as caught:
        PlaneCache(model, **POOL, namespace="n" * 129)
    assert "namespace" in caught.value.field


def test_looking_for_changes_is_cheap(model: PreTrainedModel) -> None:
    """Below 1 % of a step: some 0.3 ms for the smallest models that anybody serves."""
    first = namespace_of(model, is_shared=False)
    best = float("inf")
    for _ in range(20):
        began_s = time.perf_counter()
        assert namespace_of(model, is_shared=False) == first
        best = min(best, time.perf_counter() - began_s)
    num_tensors = len([*model.parameters(), *model.buffers()])
    assert best < num_tensors * 1e-4
