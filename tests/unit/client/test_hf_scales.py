"""The scales of 8-bit keys and values are read from a Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data_plane.server.config import DataPlaneSettings
from data_plane.server.server import load_layout
from kvplane.errors import InvalidRequestError
from kvplane.models.hf import layout_from_hf, scales_from_hf
from tests.helpers.refusals import refused

NAME = "model.layers.{}.self_attn.{}_scale"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def write(
    folder: Path,
    *values: object,
    name: str = NAME,
    dtype: torch.dtype = torch.float32,
    file: str = "model.safetensors",
) -> Path:
    """A checkpoint whose layers have these scales, those of the values ten times as large."""
    tensors = {"model.embed_tokens.weight": torch.zeros(3, 5)}
    for layer, value in enumerate(values):
        for kind, factor in (("k", 1), ("v", 10)):
            tensors[name.format(layer, kind)] = torch.tensor(value, dtype=dtype) * factor
    save_file(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_of_each_type_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    assert scales_from_hf(write(tmp_path, 0.5, 0.25, dtype=dtype), 2) == ((0.5, 0.25), (5.0, 2.5))


@pytest.mark.parametrize(
    "name",
    [
        NAME,
        "model.layers.{}.self_attn.attn.{}_scale",
        "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
        "model.layers.{0}.self_attn.{1}_proj.output_scale",
        "model.layers.{0}.self_attn.qkv_proj.{1}_scale",
        "model.decoder.layers.{}.self_attn.{}_scale",
    ],
)
def test_scales_are_found_by_each_of_their_names(tmp_path: Path, name: str) -> None:
    assert scales_from_hf(write(tmp_path, 0.5, [2.0], name=name), 2) == ((0.5, 2.0), (5.0, 20.0))


def test_one_scale_may_be_that_of_keys_and_values(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.kv_scale"
    save_file({name: torch.tensor(0.5)}, tmp_path / "model.safetensors")
    assert scales_from_hf(tmp_path, 1) == ((0.5,), (0.5,))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{0}.self_attn.{1}_proj.weight_scale",
        "model.layers.{}.mlp.{}_scale",
        "model.layers.{}.self_attn.{}_scale_inv",
    ],
)
def test_other_scales_are_left_alone(tmp_path: Path, name: str) -> None:
    assert scales_from_hf(write(tmp_path, 0.5, 0.25, name=name), 2) == ((), ())


def test_scales_of_each_head_stay_in_order(tmp_path: Path) -> None:
    folder = write(tmp_path, [0.5, 1.0], [2.0, 4.0])
    layout = layout_from_hf(folder, kv_dtype="float8_e4m3fn")
    assert layout.groups[0].key_scales == (0.5, 1.0, 2.0, 4.0)
    assert layout.groups[0].value_scales == (5.0, 10.0, 20.0, 40.0)


def test_scales_may_lie_in_a_file_beside_the_weights(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, 0.5, 0.25, file="scales.safetensors")
    assert scales_from_hf(tmp_path, 2) == ((0.5, 0.25), (5.0, 2.5))


def test_only_a_layout_of_8_bits_has_them(tmp_path: Path) -> None:
    folder = write(tmp_path, 0.5, 0.25)
    assert layout_from_hf(folder).groups[0].key_scales == ()
    assert layout_from_hf(folder, kv_dtype="float8_e5m2").groups[0].key_scales == (0.5, 0.25)


def test_a_data_plane_that_stores_8_bits_takes_them(tmp_path: Path) -> None:
    config = DataPlaneSettings(model=write(tmp_path, 0.5, 0.25), kv_dtype="float8_e4m3fn")
    layout = load_layout(config)
    assert (layout.dtype, layout.kv_dtype) == ("float32", "float8_e4m3fn")
    assert layout.groups[0].value_scales == (5.0, 2.5)


def test_a_checkpoint_without_scales_means_1(tmp_path: Path) -> None:
    group = layout_from_hf(write(tmp_path), kv_dtype="float8_e4m3fn").groups[0]
    assert (group.key_scales, group.value_scales) == ((), ())


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((0.5,), "checkpoint.k_scale"),
        ((0.5, [1.0, 2.0]), "checkpoint.k_scale"),
        (([1.0] * 3, [1.0] * 3), "layout.groups[0].key_scales"),
        ((0.5, -1.0), "layout.groups[0].key_scales"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    tmp_path: Path, values: tuple[object, ...], field: str
) -> None:
    with refused(InvalidRequestError, field):
        layout_from_hf(write(tmp_path, *values), kv_dtype="float8_e4m3fn")


def test_scales_that_two_files_disagree_on_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 0.5, 0.25)
    write(tmp_path, 0.5, 0.25, file="again.safetensors")
    assert scales_from_hf(tmp_path, 2)[0] == (0.5, 0.25)
    write(tmp_path, 0.5, 0.125, file="other.safetensors")
    with pytest.raises(InvalidRequestError, match="layer 1 has two scales that differ"):
        scales_from_hf(tmp_path, 2)


@pytest.mark.parametrize(
    "scales",
    [torch.ones(65_537), torch.ones(0), torch.ones(4, dtype=torch.float64)],
    ids=["too many", "none", "of another type"],
)
def test_scales_that_cannot_be_are_refused(tmp_path: Path, scales: torch.Tensor) -> None:
    save_file({NAME.format(0, "k"): scales}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=r"model\.safetensors is not a .*its scales are"):
        scales_from_hf(tmp_path, 2)


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, (4).to_bytes(8, "little") + b"oops"])
def test_a_file_that_is_malformed_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"model\.safetensors (is not a|cannot be)"):
        scales_from_hf(tmp_path, 2)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(InvalidRequestError, match=r"model\.safetensors cannot be read"):
        scales_from_hf(tmp_path, 2)
