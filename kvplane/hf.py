"""A pool's layout from a Hugging Face model folder: its config.json, read as JSON, and the
checkpoint's scales of keys and values where these are stored in 8 bits.

The engine and the data plane both call this on the same folder, so that their fingerprints are
equal. The default model id hashes the weights, so other weights have another id.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from kvplane.errors import InvalidRequestError
from kvplane.hf_scales import scales_from_hf
from kvplane.layout import FP8_BYTES, LayerGroup, Layout

MODEL_TYPES: Final = ("llama", "opt")


def layout_from_hf(
    folder: Path,
    *,
    block_size_tokens: int = 16,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    model_id: str | None = None,
) -> Layout:
    """The layout of the model in ``folder``, one layer group named "full".

    ``kv_dtype`` is ``dtype`` unless given; an 8-bit one has the checkpoint's scales, and if it has
    none, all are 1. ``model_id`` is, unless given, the folder's name and 16 hex digits of the
    SHA-256 over config.json and the safetensors files, in name order. Raises InvalidRequestError
    naming what is missing or wrong.
    """
    folder = Path(folder)
    config = _read_config(folder)
    num_heads = _positive(config, "num_attention_heads")
    num_layers = _positive(config, "num_hidden_layers")
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    has_scales = kv_dtype in FP8_BYTES
    key_scales, value_scales = scales_from_hf(folder, num_layers) if has_scales else ((), ())
    group = LayerGroup(
        name="full",
        layers=tuple(range(num_layers)),
        num_kv_heads=_positive(config, "num_key_value_heads", default=num_heads),
        head_size=_positive(config, "head_dim", default=_derived_head_size(config, num_heads)),
        key_scales=key_scales,
        value_scales=value_scales,
    )
    if num_heads % group.num_kv_heads:
        raise InvalidRequestError(
            f"must divide num_attention_heads, which is {num_heads}",
            field="config.num_key_value_heads",
        )
    return Layout(
        model_id=_default_model_id(folder) if model_id is None else model_id,
        block_size_tokens=block_size_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
        groups=(group,),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", field="config") from error
    except ValueError as error:
        raise InvalidRequestError(f"{path} is not JSON: {error}", field="config") from error
    if not isinstance(config, dict) or config.get("model_type") not in MODEL_TYPES:
        raise InvalidRequestError(
            f"must be one of {', '.join(MODEL_TYPES)}", field="config.model_type"
        )
    return config


def _derived_head_size(config: dict[str, Any], num_heads: int) -> int:
    hidden_size = _positive(config, "hidden_size")
    if hidden_size % num_heads:
        raise InvalidRequestError(
            f"must be a multiple of num_attention_heads, which is {num_heads}",
            field="config.hidden_size",
        )
    return hidden_size // num_heads


def _positive(config: dict[str, Any], name: str, *, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:  # absent, or null: transformers writes both
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequestError("must be a positive integer", field=f"config.{name}")
    return value


def _default_model_id(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return f"{folder.resolve().name}-{digest.hexdigest()[:16]}"
