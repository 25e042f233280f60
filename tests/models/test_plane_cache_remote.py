"""A PlaneCache whose planes are other processes gives what eager attention gives: families with
several layer groups, sinks, soft cap, ALiBi, latents, and V narrower than K, over real sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from data_plane.server.server import layout_from_json
from engine.commands.main import main
from kvplane import Layout
from kvplane.errors import LayoutMismatchError
from kvplane.transformers import PlaneCache, close_planes
from kvplane.transformers.models import adapters
from tests.e2e.engine_planes import Process, data_plane
from tests.helpers.plane_cache_checks import CHECKS, Check, greedy_with_padding, second_call
from tests.models.tiny_models import save_tiny

FAMILIES = ("deepseek_v3", "gpt_oss")
NIGHTLY = ("bloom", "cohere2", "falcon", "gemma2", "gemma4_text", "mistral", "olmo3", "qwen3")
OWN_SHAPES = "mimo_v2_flash"


def started(control: str, folder: Path, layout: Layout | None = None) -> Process:
    """A data plane of the folder's model, or of a layout; its pool has the folder's name."""
    log, flags = folder / "data.log", ("--num-device-blocks", "128")
    return data_plane(control, layout or folder, log, *flags, pool_id=folder.name).start()


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    )
    adapters.adapt(model)
    return model.train(False)


def settings(control: str, folder: Path) -> dict[str, Any]:
    return {"control_plane": control, "pool_id": folder.name, "timeout_s": 30.0}


@pytest.fixture(
    scope="module",
    params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)],
)
def remote(
    request: pytest.FixtureRequest, control: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PreTrainedModel, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    data = started(control, folder)
    model = load(folder)
    yield model, settings(control, folder)
    close_planes(model)
    data.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_planes_elsewhere_give_what_eager_attention_gives(
    remote: tuple[PreTrainedModel, dict[str, Any]], check: Check
) -> None:
    check(remote[0], **remote[1])


def test_a_layout_that_only_the_loaded_model_tells_is_printed_for_a_data_plane(
    control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its config such a model has half the KV heads in its layers with a window."""
    save_tiny(OWN_SHAPES, tmp_path)
    model = load(tmp_path)
    data = started(control, tmp_path)
    with pytest.raises(LayoutMismatchError):
        PlaneCache(model, **settings(control, tmp_path))
    data.stop()
    printed = {}
    for flag in ("--no-probe", "--probe"):
        assert main(["layout", "--model", str(tmp_path), flag]) == 0
        printed[flag] = capsys.readouterr().out
    assert printed["--no-probe"] != printed["--probe"]
    (tmp_path / "layout.json").write_text(printed["--probe"])
    data = started(control, tmp_path, layout_from_json(tmp_path / "layout.json"))
    for check in (greedy_with_padding, second_call):
        check(model, **settings(control, tmp_path))
    close_planes(model)
    data.stop()
