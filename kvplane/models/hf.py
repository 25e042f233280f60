"""A pool's layout from a Hugging Face model folder: its config as transformers reads it, so that
defaults of the model's class count, and the checkpoint's scales of keys and values where these are
stored in 8 bits.

The engine and the data plane both call this on the same folder, so that their fingerprints are
equal. A data plane without transformers takes a file that ``kvplane layout`` wrote. The
default model id hashes the weights, so other weights have another id.

Quantising tools save one scale, or one for each KV head, beside each layer's attention weights: as
``k_scale`` and ``v_scale`` of ``self_attn``, of its ``attn`` or of a projection, as
``output_scale`` of ``k_proj`` and ``v_proj``, or as one ``kv_scale`` for both. vLLM reads the same
names.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvplane.errors import InvalidRequestError
from kvplane.layout import FLOAT_BYTES, FP8_BYTES, LATENT, LayerGroup, Layout
from kvplane.models.config import read_config
from kvplane.models.model_layers import has_states, layer_groups

_NAME: Final = re.compile(
    r"layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.|(?:k|v|qkv)_proj\.)?(k|v|kv)_scale|([kv])_proj\.output_scale)$"
)
_TYPES: Final = ("F32", "F16", "BF16")  # by safetensors' names
_MAX_SCALES: Final = 65_536  # one for each of the most KV heads


def layout_from_hf(
    folder: Path,
    *,
    block_size_tokens: int = 16,
    dtype: str = "auto",
    kv_dtype: str | None = None,
    model_id: str | None = None,
    groups: tuple[LayerGroup, ...] | None = None,
    latent: bool = True,
) -> Layout:
    """Return the layout that a pool needs for the model in ``folder``.

    ``dtype``: "auto" takes the checkpoint's. ``groups`` default to the config's; the probe of the
    loaded model finds others if its code differs from its config
    (``kvplane/transformers/models/probe.py``). ``latent``: see ``layer_groups``. ``kv_dtype``
    defaults to ``dtype``; an 8-bit one has the checkpoint's scales, or scales of 1 if it has none.
    ``model_id`` defaults to the folder's name and 16 hex digits of the SHA-256 over config.json and
    the weights' files, in name order. Raises InvalidRequestError naming what is missing or wrong,
    transformers included.
    """
    folder = Path(folder)
    dtype = checkpoint_dtype(folder) if dtype == "auto" else dtype
    groups = _groups(folder, latent) if groups is None else groups
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    if kv_dtype in FP8_BYTES:
        groups = _with_scales(groups, folder)
    return Layout(
        model_id=_default_model_id(folder) if model_id is None else model_id,
        block_size_tokens=block_size_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
        groups=groups,
    )


def checkpoint_dtype(folder: Path) -> str:
    """Return the dtype that the config in ``folder`` states, or its text model's; "float32" where
    neither states one. Raises InvalidRequestError.
    """
    config = _config(folder)
    stated = config.dtype or config.get_text_config().dtype or "float32"
    dtype = str(stated).removeprefix("torch.")
    if dtype not in FLOAT_BYTES:
        raise InvalidRequestError(f"is {dtype}: give --dtype", field="config.dtype")
    return dtype


def _config(folder: Path) -> Any:
    try:
        return read_config(folder)
    except ImportError as error:
        raise InvalidRequestError(
            "cannot be read without transformers: install kvplane[transformers], or give --layout "
            "a file that 'kvplane layout' wrote",
            field="model",
        ) from error


def _groups(folder: Path, latent: bool) -> tuple[LayerGroup, ...]:
    config = _config(folder)
    if has_states(config):
        raise InvalidRequestError(
            "has running states, whose size its config does not tell: give --layout a file that "
            "'kvplane layout --probe' wrote",
            field="config.layer_types",
        )
    return layer_groups(config, latent=latent)


def _with_scales(groups: tuple[LayerGroup, ...], folder: Path) -> tuple[LayerGroup, ...]:
    """Return the groups with the checkpoint's scales, layer after layer: one for each layer, or one
    for each of its KV heads. Latents have those of keys.
    """
    scaled = []
    num_layers = sum(len(group.layers) for group in groups)
    of_layers = [_by_layer(scales, num_layers) for scales in scales_from_hf(folder, num_layers)]
    for group in groups:
        keys, values = (
            tuple(scale for layer in group.layers for scale in scales[layer]) if scales else ()
            for scales in of_layers
        )
        if group.cache_kind == LATENT:
            values = ()
        scaled.append(replace(group, key_scales=keys, value_scales=values))
    return tuple(scaled)


def _by_layer(scales: tuple[float, ...], num_layers: int) -> list[tuple[float, ...]]:
    count = len(scales) // num_layers
    return [scales[i * count : (i + 1) * count] for i in range(num_layers)] if scales else []


def _default_model_id(folder: Path) -> str:
    digest = hashlib.sha256()
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    for path in (folder / "config.json", *weights):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return f"{folder.resolve().name}-{digest.hexdigest()[:16]}"


def scales_from_hf(folder: Path, num_layers: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read keys' and values' scales, layer after layer, as ``LayerGroup`` has them; empty when no
    file of ``folder`` has any. Raises InvalidRequestError naming what is malformed or missing.
    """
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for kind, layer, scales in _scales_of_file(path):
            if found.setdefault((kind, layer), scales) != scales:
                raise InvalidRequestError(
                    f"layer {layer} has two scales that differ", field=f"checkpoint.{kind}_scale"
                )
    if not found:
        return (), ()
    key_scales, value_scales = (_of_all_layers(found, kind, num_layers) for kind in "kv")
    return key_scales, value_scales


def _of_all_layers(
    found: dict[tuple[str, int], tuple[float, ...]], kind: str, num_layers: int
) -> tuple[float, ...]:
    missing = [layer for layer in range(num_layers) if (kind, layer) not in found]
    if missing:
        raise InvalidRequestError(
            f"layer {missing[0]} has none, but others do", field=f"checkpoint.{kind}_scale"
        )
    layers = [found[kind, layer] for layer in range(num_layers)]
    if len({len(scales) for scales in layers}) > 1:
        raise InvalidRequestError(
            "layers have different numbers of scales", field=f"checkpoint.{kind}_scale"
        )
    return tuple(scale for scales in layers for scale in scales)


def _scales_of_file(path: Path) -> Iterator[tuple[str, int, tuple[float, ...]]]:
    """Yield ("k" or "v", layer, scales) of each tensor that holds scales."""
    from safetensors import SafetensorError, safe_open  # of transformers, which read the config

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                if match := _NAME.search(name):
                    scales = _numbers(file, name)
                    for kind in match[2] or match[3]:
                        yield kind, int(match[1]), scales
    except (SafetensorError, ValueError) as error:
        raise InvalidRequestError(
            f"{path} is not a safetensors file: {error}", field="checkpoint"
        ) from error
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", field="checkpoint") from error


def _numbers(file: Any, name: str) -> tuple[float, ...]:
    tensor = file.get_slice(name)
    kind, shape = tensor.get_dtype(), tensor.get_shape()
    if kind not in _TYPES or not 0 < math.prod(shape) <= _MAX_SCALES:
        raise ValueError(f"its scales are of type {kind} and shape {shape}")
    return tuple(file.get_tensor(name).flatten().tolist())
