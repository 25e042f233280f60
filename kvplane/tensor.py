"""A dense row-major tensor as bytes, without an array library; from and to those of any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from kvplane.arrays import dlpack
from kvplane.errors import InvalidRequestError
from kvplane.layout import ELEMENT_BYTES, dtype_from_wire, dtype_to_wire
from kvplane.v1 import types_pb2 as pb

MAX_DIMENSIONS: Final = 8
_NUMPY_DTYPES: Final = ("float32", "float16")


@dataclass(frozen=True, slots=True)
class Tensor:
    """``data`` holds product(shape) little-endian elements of ``dtype``, row-major.

    What takes DLPack, such as torch.from_dlpack, gets a copy, which numpy or torch makes. Valid by
    construction: raises InvalidRequestError with field "dtype", "shape" or "data".
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

    @classmethod
    def from_array(cls, array: Any) -> Tensor:
        """From an array of numpy, torch or another library that speaks DLPack; copies the data.

        Raises InvalidRequestError for one that is not on the CPU, not contiguous, or of a type
        that layouts do not have.
        """
        return cls(*dlpack.read(array))

    def numpy(self) -> Any:
        """As a numpy array, a copy. Raises InvalidRequestError for a type that numpy lacks."""
        if self.dtype not in _NUMPY_DTYPES:
            raise InvalidRequestError(f"numpy has no {self.dtype}: use torch()", field="dtype")
        numpy = import_module("numpy")
        return numpy.frombuffer(bytearray(self.data), self.dtype).reshape(self.shape)

    def torch(self) -> Any:
        """As a torch tensor on the CPU, a copy."""
        torch = import_module("torch")
        dtype = getattr(torch, self.dtype)
        if not self.num_elements:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)

    def __dlpack__(self, **how: Any) -> Any:
        array = self.numpy() if self.dtype in _NUMPY_DTYPES else self.torch()
        return array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

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

    def of_heads(self, heads: Sequence[range]) -> Tensor:
        """These ``heads``, one range after another, of a tensor [num_tokens, num_heads, size]."""
        num_tokens, num_heads, size = self.shape
        num_taken = sum(len(each) for each in heads)
        if num_taken == num_heads:
            return self
        view, head_bytes = memoryview(self.data), size * ELEMENT_BYTES[self.dtype]
        data = b"".join(
            view[(first + each.start) * head_bytes : (first + each.stop) * head_bytes]
            for first in range(0, num_tokens * num_heads, num_heads)
            for each in heads
        )
        return Tensor(self.dtype, (num_tokens, num_taken, size), data)


def join_heads(parts: Sequence[tuple[Tensor, Sequence[range]]]) -> Tensor:
    """The inverse of ``of_heads``: tensors [num_tokens, heads of the part, size] and which heads
    each has. Together they have every head once.
    """
    if len(parts) == 1:
        return parts[0][0]
    num_tokens, _, size = parts[0][0].shape
    pieces = []  # of a range: its first head, its tensor, and which bytes of a token it takes
    for tensor, heads in parts:
        head_bytes, before = size * ELEMENT_BYTES[tensor.dtype], 0
        token_bytes = tensor.shape[1] * head_bytes
        for each in heads:
            after = before + len(each) * head_bytes
            pieces.append((each.start, memoryview(tensor.data), token_bytes, before, after))
            before = after
    pieces.sort(key=lambda piece: piece[0])
    data = b"".join(
        view[token * token_bytes + before : token * token_bytes + after]
        for token in range(num_tokens)
        for _, view, token_bytes, before, after in pieces
    )
    num_heads = sum(tensor.shape[1] for tensor, _ in parts)
    return Tensor(parts[0][0].dtype, (num_tokens, num_heads, size), data)
