"""Columns: repeated fields of the contract, as the bytes that hold their elements side by side.

Messages that name many sequences or blocks have one column for each attribute (see
``protos/kvplane/v1/types.proto``). In the twin (``kvplane.wire.v1``) a column is bytes, packed and
read in one call, with no object for each element: ``read`` returns an ``array``, which numpy and
torch take without a copy.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from kvplane.errors import InvalidRequestError

INT32: Final = "i"
INT64: Final = "q"
UINT8: Final = "B"
_SIZES: Final = {kind: array(kind).itemsize for kind in (INT32, INT64, UINT8)}
_IS_BIG_ENDIAN: Final = sys.byteorder == "big"


def pack(kind: str, values: Iterable[int] | array[int]) -> bytes:
    """Pack a column of ``INT32``, ``INT64`` or ``UINT8`` elements. Raises OverflowError when one
    does not fit.
    """
    column = (
        values if isinstance(values, array) and values.typecode == kind else array(kind, values)
    )
    if _IS_BIG_ENDIAN:
        column = array(kind, column)
        column.byteswap()
    return column.tobytes()


def read(kind: str, column: bytes, field: str, *, length: int | None = None) -> array[int]:
    """Parse the elements of a column. Raises InvalidRequestError naming ``field`` when the column
    ends inside an element, or does not have ``length`` elements.
    """
    elements = array(kind)
    size = elements.itemsize
    if len(column) % size:
        raise InvalidRequestError(f"must hold {size} bytes for each element", field=field)
    if length is not None and len(column) != length * size:
        raise InvalidRequestError(
            f"must have {length} elements, has {len(column) // size}", field=field
        )
    elements.frombytes(column)
    if _IS_BIG_ENDIAN:
        elements.byteswap()
    return elements


def count(kind: str, column: bytes) -> int:
    """Return the number of elements of a column, computed from its length alone."""
    return len(column) // _SIZES[kind]


def size_bytes(kind: str) -> int:
    """Return the size in bytes of one element of a column of this kind."""
    return _SIZES[kind]


def part(kind: str, column: bytes, begin: int, end: int) -> bytes:
    """Return the part of a column that holds the elements from ``begin`` up to ``end``."""
    return column[_SIZES[kind] * begin : _SIZES[kind] * end]


def zeros(kind: str, length: int) -> array[int]:
    """Return an array of ``length`` zeros."""
    return array(kind, bytes(_SIZES[kind] * length))


def fixed(column: bytes, size_bytes: int) -> Sequence[bytes]:
    """Split a column into elements of ``size_bytes`` each, such as hashes."""
    return [column[i : i + size_bytes] for i in range(0, len(column), size_bytes)]
