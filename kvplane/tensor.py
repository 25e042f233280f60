"""A dense row-major tensor as bytes, without an array library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvplane.errors import InvalidRequestError
from kvplane.layout import ELEMENT_BYTES, dtype_from_wire, dtype_to_wire
from kvplane.v1 import types_pb2 as pb

MAX_DIMENSIONS: Final = 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """``data`` holds product(shape) little-endian elements of ``dtype``, row-major.

    Valid by construction: raises InvalidRequestError with field "dtype", "shape" or "data".
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise InvalidRequestError(
                f"{self.dtype!r} is none of {', '.join(ELEMENT_BYTES)}", field="dtype"
            )
        if len(self.shape) > MAX_DIMENSIONS or any(extent < 0 for extent in self.shape):
            raise InvalidRequestError(
                f"must be at most {MAX_DIMENSIONS} extents, none negative", field="shape"
            )
        num_bytes = memoryview(self.data).nbytes
        if num_bytes != self.num_bytes:
            raise InvalidRequestError(
                f"{self.dtype} of shape {list(self.shape)} takes {self.num_bytes} bytes, "
                f"not {num_bytes}",
                field="data",
            )

    @staticmethod
    def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of a known ``dtype`` and ``shape``."""
        return math.prod(shape) * ELEMENT_BYTES[dtype]

    @property
    def num_elements(self) -> int:
        """Product of the extents."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that the elements take."""
        return self.size_bytes(self.dtype, self.shape)

    def to_proto(self) -> pb.Tensor:
        """As a message; copies the data."""
        return pb.Tensor(dtype=dtype_to_wire(self.dtype), shape=self.shape, data=bytes(self.data))

    @classmethod
    def from_proto(cls, message: pb.Tensor, *, field: str = "tensor") -> Tensor:
        """From a message. Raises InvalidRequestError naming ``field``.dtype, .shape or .data, and
        ``field``.memory for elements in shared memory: no region is agreed with any peer.
        """
        if message.HasField("memory"):
            raise InvalidRequestError(
                "names shared memory, which is not served here: send the elements as data",
                field=f"{field}.memory",
            )
        dtype = dtype_from_wire(message.dtype, field=f"{field}.dtype")
        try:
            return cls(dtype, tuple(message.shape), message.data)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, field=f"{field}.{error.field}") from None
