"""Reads arrays of numpy, torch, jax and others by the DLPack protocol, from memory of the CPU.

The structs are those of dlpack.h, versions 0 and 1.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, Final

from kvplane.errors import InvalidRequestError

CPU: Final = 1
"""The kind of device."""
_VERSION: Final = (1, 0)
# By code and bits of an element.
_TYPES: Final = {
    (2, 32): "float32",
    (2, 16): "float16",
    (4, 16): "bfloat16",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}


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


def read(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Type, shape and row-major elements of an array that has ``__dlpack__``.

    Raises InvalidRequestError for what is not on the CPU, not contiguous or of another type.
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
    if int(array.__dlpack_device__()[0]) != CPU:
        raise InvalidRequestError("is not on the CPU: copy it there first", field="array")
    try:
        try:
            return array.__dlpack__(max_version=_VERSION)  # older ones have no read-only arrays
        except TypeError:
            return array.__dlpack__()
    except BufferError as error:
        raise InvalidRequestError(f"cannot be read: {error}", field="array") from error


def _strides(shape: tuple[int, ...], tensor: _DLTensor) -> tuple[int, ...]:
    """Those of a contiguous array; of extents of 1, which are never stepped over, the tensor's."""
    return tuple(
        tensor.strides[i] if extent == 1 or 0 in shape else math.prod(shape[i + 1 :])
        for i, extent in enumerate(shape)
    )
