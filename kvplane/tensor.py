"""A dense row-major tensor as bytes, without an array library; converts to and from arrays of any.

Arrays of numpy, torch, jax and others are read by the DLPack protocol, from memory of the CPU. The
structs are those of dlpack.h, versions 0 and 1.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from kvplane.errors import InvalidRequestError
from kvplane.layout import ELEMENT_BYTES
from kvplane.wire.dtypes import dtype_from_wire, dtype_to_wire
from kvplane.wire.v1 import types_pb2 as pb

MAX_DIMENSIONS: Final = 8
_NUMPY_DTYPES: Final = ("float32", "float16", "uint8")
_CPU: Final = 1
"""Number of the device type "CPU" in DLPack."""
_VERSION: Final = (1, 0)
# By code and bits of an element.
_TYPES: Final = {
    (2, 32): "float32",
    (2, 16): "float16",
    (4, 16): "bfloat16",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
    (1, 8): "uint8",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in bytes. ``data`` holds product(shape) little-endian elements of ``dtype``,
    row-major.

    Consumers of DLPack, such as torch.from_dlpack, get a copy, which numpy or torch makes. Valid by
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
    def zeros(cls, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Make a tensor of zeros. Raises as the constructor does."""
        if dtype not in ELEMENT_BYTES or any(extent < 0 for extent in shape):
            return cls(dtype, shape, b"")  # which raises
        return cls(dtype, shape, bytes(cls.size_bytes(dtype, shape)))

    @classmethod
    def from_array(cls, array: Any) -> Tensor:
        """Copy an array of numpy, torch or another library that speaks DLPack.

        Raises InvalidRequestError for one that is not on the CPU, not contiguous, or of a type
        that layouts do not have.
        """
        return cls(*_read_array(array))

    def numpy(self) -> Any:
        """Copy it to a numpy array. Raises InvalidRequestError for a type that numpy lacks."""
        if self.dtype not in _NUMPY_DTYPES:
            raise InvalidRequestError(f"numpy has no {self.dtype}: use torch()", field="dtype")
        numpy = import_module("numpy")
        return numpy.frombuffer(bytearray(self.data), self.dtype).reshape(self.shape)

    def torch(self) -> Any:
        """Copy it to a torch tensor on the CPU."""
        torch = import_module("torch")
        dtype = getattr(torch, self.dtype)
        if not self.num_elements:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)

    def __dlpack__(self, **how: Any) -> Any:
        array = self.numpy() if self.dtype in _NUMPY_DTYPES else self.torch()
        return array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    @staticmethod
    def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
        """Return the bytes that a tensor of this ``dtype``, which is known, and ``shape`` takes."""
        return math.prod(shape) * ELEMENT_BYTES[dtype]

    @property
    def num_elements(self) -> int:
        """Number of elements: the product of the extents."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that the elements take."""
        return self.size_bytes(self.dtype, self.shape)

    def to_proto(self) -> pb.Tensor:
        """Convert the tensor to a message, copying the data."""
        return pb.Tensor(dtype=dtype_to_wire(self.dtype), shape=self.shape, data=bytes(self.data))

    @classmethod
    def from_proto(
        cls, message: pb.Tensor, *, field: str = "tensor", data: memoryview | None = None
    ) -> Tensor:
        """Parse a message. ``data``: the elements, where they came beside it; None for its own.

        Raises InvalidRequestError naming ``field``.dtype, .shape or .data, and ``field``.memory for
        elements in shared memory: no region is agreed with any peer.
        """
        if message.HasField("memory"):
            raise InvalidRequestError(
                "names shared memory, which is not served here: send the elements as data",
                field=f"{field}.memory",
            )
        dtype = dtype_from_wire(message.dtype, field=f"{field}.dtype")
        try:
            return cls(dtype, tuple(message.shape), message.data if data is None else data)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, field=f"{field}.{error.field}") from None

    def of_heads(self, heads: Sequence[range]) -> Tensor:
        """Select ``heads``, one range after another, of a tensor [num_tokens, num_heads, size]."""
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
    """Join tensors [num_tokens, heads of the part, size] by heads, given the heads of each: the
    inverse of ``of_heads``. Together they have every head once.
    """
    if len(parts) == 1:
        return parts[0][0]
    num_tokens, _, size = parts[0][0].shape
    pieces = []  # for each range: its first head, its tensor, and which bytes of a token it takes
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


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", c_void_p), ("deleter", c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _DLTensor),
    )


_STRUCTS: Final = {b"dltensor": _Managed, b"dltensor_versioned": _ManagedVersioned}
_name_of: Final = ctypes.PYFUNCTYPE(c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer_of: Final = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _read_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return type, shape and row-major elements of an array that has ``__dlpack__``.

    Raises InvalidRequestError for one that is not on the CPU, not contiguous or of another type.
    """
    capsule = _capsule_of(array)
    kind = _name_of(capsule)
    if kind not in _STRUCTS:
        raise InvalidRequestError("its __dlpack__ gives no DLPack tensor", field="array")
    managed = _STRUCTS[kind].from_address(_pointer_of(capsule, kind))
    tensor: _DLTensor = managed.tensor
    dtype = _TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise InvalidRequestError(
            f"its elements are none of {', '.join(_TYPES.values())}: convert them first",
            field="dtype",
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and tuple(tensor.strides[: tensor.ndim]) != _strides(shape, tensor):
        raise InvalidRequestError(
            "is not contiguous: pass array.contiguous(), or numpy.ascontiguousarray(array)",
            field="array",
        )
    num_bytes = math.prod(shape) * tensor.bits // 8
    if not num_bytes:
        return dtype, shape, b""
    return dtype, shape, ctypes.string_at(tensor.data + tensor.byte_offset, num_bytes)


def _capsule_of(array: Any) -> Any:
    if not hasattr(array, "__dlpack__"):
        raise InvalidRequestError(
            f"is a {type(array).__name__}: an array of numpy, torch or another library that has "
            "__dlpack__ is needed",
            field="array",
        )
    if int(array.__dlpack_device__()[0]) != _CPU:
        raise InvalidRequestError("is not on the CPU: copy it there first", field="array")
    try:
        try:
            return array.__dlpack__(max_version=_VERSION)  # older ones have no read-only arrays
        except TypeError:
            return array.__dlpack__()
    except BufferError as error:
        raise InvalidRequestError(f"cannot be read: {error}", field="array") from error


def _strides(shape: tuple[int, ...], tensor: _DLTensor) -> tuple[int, ...]:
    """Return a contiguous array's strides; where the extent is 1, the tensor's own."""
    return tuple(
        tensor.strides[i] if extent == 1 or 0 in shape else math.prod(shape[i + 1 :])
        for i, extent in enumerate(shape)
    )
