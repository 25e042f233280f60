"""Scales of 8-bit keys and values that a Hugging Face checkpoint carries.

Quantising tools save one number, or one for each KV head, beside each layer's attention weights:
``model.layers.0.self_attn.k_scale`` and ``v_scale``, as vLLM reads them. A safetensors file is the
length of its header in 8 bytes, the header as JSON, and raw little-endian numbers.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvplane.errors import InvalidRequestError

_NAME: Final = re.compile(r"layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")
_MAX_HEADER_BYTES: Final = 100 << 20  # the format's own limit
_MAX_TENSOR_BYTES: Final = 4 * 65_536  # a float32 for each of the most KV heads


def scales_from_hf(folder: Path, num_layers: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Keys' and values' scales as ``LayerGroup`` has them, layer after layer; empty when no file of
    ``folder`` has any. Raises InvalidRequestError naming what is malformed or missing.
    """
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for kind, layer, scales in _scales_of_file(path):
            found[kind, layer] = scales
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
            f"layer {missing[0]} has none, and others have", field=f"checkpoint.{kind}_scale"
        )
    layers = [found[kind, layer] for layer in range(num_layers)]
    if len({len(scales) for scales in layers}) > 1:
        raise InvalidRequestError("not as many in each layer", field=f"checkpoint.{kind}_scale")
    return tuple(scale for scales in layers for scale in scales)


def _scales_of_file(path: Path) -> Iterator[tuple[str, int, tuple[float, ...]]]:
    """("k" or "v", layer, scales) of each tensor that holds scales."""
    with path.open("rb") as file:
        try:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {num_bytes} bytes")
            header: dict[str, dict[str, Any]] = json.loads(file.read(num_bytes))
            for name, tensor in header.items():
                if match := _NAME.search(name):
                    yield match[2], int(match[1]), _numbers(file, 8 + num_bytes, tensor)
        except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRequestError(
                f"{path} is no safetensors file: {error}", field="checkpoint"
            ) from error


def _numbers(file: BinaryIO, begin: int, tensor: dict[str, Any]) -> tuple[float, ...]:
    first, end = tensor["data_offsets"]
    if not 0 <= first < end <= first + _MAX_TENSOR_BYTES:
        raise ValueError(f"scales at {first} to {end}")
    file.seek(begin + first)
    data = file.read(end - first)
    if len(data) < end - first:
        raise ValueError("it ends too early")
    match tensor["dtype"]:
        case "F32":
            return struct.unpack(f"<{len(data) // 4}f", data)
        case "F16":
            return struct.unpack(f"<{len(data) // 2}e", data)
        case "BF16":  # the upper halves of float32
            halves = struct.unpack(f"<{len(data) // 2}H", data)
            wide = struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves))
            return struct.unpack(f"<{len(halves)}f", wide)
    raise ValueError(f"scales of type {tensor['dtype']}")
