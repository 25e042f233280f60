"""Scales of 8-bit keys and values that a Hugging Face checkpoint carries.

Quantising tools save one number, or one for each KV head, beside each layer's attention weights: as
``k_scale`` and ``v_scale`` of ``self_attn``, of its ``attn`` or of a projection, as
``output_scale`` of ``k_proj`` and ``v_proj``, or as one ``kv_scale`` for both. vLLM reads the same
names. A safetensors file consists of 8 bytes that hold the length of its header, the header as
JSON, and raw little-endian numbers.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvplane.errors import InvalidRequestError

_NAME: Final = re.compile(
    r"layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.|(?:k|v|qkv)_proj\.)?(k|v|kv)_scale|([kv])_proj\.output_scale)$"
)
_FORMATS: Final = {"F32": "f", "F16": "e", "BF16": "H"}  # by safetensors' names
_MAX_HEADER_BYTES: Final = 100 << 20  # the format's own limit
_MAX_TENSOR_BYTES: Final = 4 * 65_536  # a float32 for each of the most KV heads


def scales_from_hf(folder: Path, num_layers: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Keys' and values' scales as ``LayerGroup`` has them, layer after layer; empty when no file of
    ``folder`` has any. Raises InvalidRequestError naming what is malformed or missing.
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
    """("k" or "v", layer, scales) of each tensor that holds scales."""
    try:
        with path.open("rb") as file:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {num_bytes} bytes")
            header: dict[str, dict[str, Any]] = json.loads(file.read(num_bytes))
            for name, tensor in header.items():
                if match := _NAME.search(name):
                    scales = _numbers(file, 8 + num_bytes, tensor)
                    for kind in match[2] or match[3]:
                        yield kind, int(match[1]), scales
    except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequestError(
            f"{path} is not a safetensors file: {error}", field="checkpoint"
        ) from error
    except (OSError, RecursionError, OverflowError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", field="checkpoint") from error


def _numbers(file: BinaryIO, begin: int, tensor: dict[str, Any]) -> tuple[float, ...]:
    if tensor["dtype"] not in _FORMATS:
        raise ValueError(f"its scales are of type {tensor['dtype']}")
    numbers = struct.Struct(f"<{math.prod(tensor['shape'])}{_FORMATS[tensor['dtype']]}")
    first, end = tensor["data_offsets"]
    if first < 0 or not 0 < end - first == numbers.size <= _MAX_TENSOR_BYTES:
        raise ValueError(f"it has scales of shape {tensor['shape']} at bytes {first} to {end}")
    file.seek(begin + first)
    data = file.read(numbers.size)
    if len(data) < numbers.size:
        raise ValueError("it ends too early")
    if tensor["dtype"] == "BF16":  # the upper halves of float32
        wide = [half << 16 for half in numbers.unpack(data)]
        return struct.unpack(f"<{len(wide)}f", struct.pack(f"<{len(wide)}I", *wide))
    return numbers.unpack(data)
