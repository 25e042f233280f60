"""The pool of an embedded engine leaves room for the largest step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from engine.models import loader
from engine.running import step_memory
from engine.running.step_memory import utilization_beside_step
from kvplane.errors import NeverFitsError
from kvplane.layout import Layout
from kvplane.models.hf import layout_from_hf
from tests.helpers.engine_harness import LLAMA, save_model

MIB = 1 << 20
FREE = 600 * MIB
MAX_TOKENS = 512


@pytest.fixture(autouse=True)
def _little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "free_bytes", lambda device: FREE)


def model_of(folder: Path, intermediate_size: int) -> tuple[PreTrainedModel, Layout]:
    config = LlamaConfig.from_dict(
        LLAMA.to_dict() | {"intermediate_size": intermediate_size, "num_hidden_layers": 1}
    )
    save_model(config, folder)
    groups = loader.load(folder, "float32", probe=False)
    layout = layout_from_hf(
        folder, block_size_tokens=16, dtype="float32", kv_dtype="float32", groups=groups.groups
    )
    return groups.model, layout


def share(model: PreTrainedModel, layout: Layout, **settings: int) -> float:
    given = {"num_processes": 1, "max_batch_tokens": MAX_TOKENS, "max_sequences": 16} | settings
    return utilization_beside_step(model, layout, utilization=0.9, **given)


def test_a_model_with_a_fat_mlp_gets_a_smaller_pool_and_its_steps_fit_beside_it(
    tmp_path: Path,
) -> None:
    thin, fat = (model_of(tmp_path / str(size), size) for size in (64, 40_000))
    thin_share, fat_share = share(*thin), share(*fat)
    assert 0.85 < thin_share <= 0.9
    # Of each token the step holds at least the gate and what goes up, in float32, at one time.
    assert fat_share * FREE < thin_share * FREE - 2 * MAX_TOKENS * 40_000 * 4

    before = step_memory._kib("VmRSS")
    pool = torch.ones(int(fat_share * FREE), dtype=torch.uint8)
    (step_memory._PROCESS / "clear_refs").write_text("5")
    step_memory.run_largest_step(*fat, MAX_TOKENS, 16)
    assert 1024 * (step_memory._kib("VmHWM") - before) <= FREE, len(pool)


def test_processes_of_one_machine_share_what_is_free(tmp_path: Path) -> None:
    model, layout = model_of(tmp_path, 64)
    assert share(model, layout, num_processes=2) < 0.46


def test_a_step_that_takes_all_memory_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_memory, "free_bytes", lambda device: 8 * MIB)
    with pytest.raises(NeverFitsError) as caught:
        share(*model_of(tmp_path, 40_000))
    assert caught.value.field == "max_batch_tokens"
