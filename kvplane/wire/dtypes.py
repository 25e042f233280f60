"""Names of element types, and their values in messages."""

from __future__ import annotations

from typing import Final

from kvplane.errors import InvalidRequestError
from kvplane.wire.v1 import types_pb2 as pb

_TO_WIRE: Final = {
    "float32": pb.ELEMENT_TYPE_FLOAT32,
    "float16": pb.ELEMENT_TYPE_FLOAT16,
    "bfloat16": pb.ELEMENT_TYPE_BFLOAT16,
    "float8_e4m3fn": pb.ELEMENT_TYPE_FLOAT8_E4M3FN,
    "float8_e5m2": pb.ELEMENT_TYPE_FLOAT8_E5M2,
    "uint8": pb.ELEMENT_TYPE_UINT8,
}
_FROM_WIRE: Final = {v: k for k, v in _TO_WIRE.items()}


def dtype_to_wire(dtype: str) -> pb.ElementType:
    """Convert ``"bfloat16"`` to ``ELEMENT_TYPE_BFLOAT16``. Raises InvalidRequestError."""
    if dtype not in _TO_WIRE:
        raise InvalidRequestError(f"{dtype!r} is none of {', '.join(_TO_WIRE)}", field="dtype")
    return _TO_WIRE[dtype]


def dtype_from_wire(value: pb.ElementType, *, field: str) -> str:
    """Convert an ElementType to its name. Raises InvalidRequestError naming ``field``."""
    if value not in _FROM_WIRE:
        raise InvalidRequestError(f"element type {value} is not known", field=field)
    return _FROM_WIRE[value]
