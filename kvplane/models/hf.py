"""A pool's layout from a Hugging Face model folder: its config as transformers reads it, so that
defaults of the model's class count, and the checkpoint's scales of keys and values where these are
stored in 8 bits.

The engine and the data plane both call this on the same folder, so that their fingerprints are
equal. A data plane without transformers takes a file that ``python -m engine layout`` wrote. The
default model id hashes the weights, so other weights have another id.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from kvplane.errors import InvalidRequestError
from kvplane.layout import FP8_BYTES, LATENT, LayerGroup, Layout
from kvplane.models.hf_scales import scales_from_hf
from kvplane.models.model_layers import layer_groups


def layout_from_hf(
    folder: Path,
    *,
    block_size_tokens: int = 16,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    model_id: str | None = None,
    groups: tuple[LayerGroup, ...] | None = None,
    latent: bool = True,
) -> Layout:
    """The layout of the model in ``folder``.

    ``groups`` are those of its config unless given, ``latent`` as of ``layer_groups``: the probe of
    the loaded model finds others where its code does otherwise
    (``kvplane/transformers/models/probe.py``).
    ``kv_dtype`` is ``dtype`` unless given; an 8-bit one has the checkpoint's scales, and if it has
    none, all are 1. ``model_id`` is, unless given, the folder's name and 16 hex digits of the
    SHA-256 over config.json and the weights' files, in name order. Raises InvalidRequestError
    naming what is missing or wrong, transformers included.
    """
    folder = Path(folder)
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


def _groups(folder: Path, latent: bool) -> tuple[LayerGroup, ...]:
    try:
        from kvplane.models.config import read_config
    except ImportError as error:
        raise InvalidRequestError(
            "cannot be read without transformers: install kvplane[transformers], or give --layout "
            "a file that 'python -m engine layout' wrote",
            field="model",
        ) from error
    return layer_groups(read_config(folder), latent=latent)


def _with_scales(groups: tuple[LayerGroup, ...], folder: Path) -> tuple[LayerGroup, ...]:
    """Scales come layer after layer, one for each layer or one for each KV head of it. Latents have
    those of keys.
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
