"""A plan's columns as numpy arrays, and checks of whole columns at once.

A plan may have thousands of blocks and spans, so nothing here makes an object for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvplane import columns
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.v1 import types_pb2 as pb

Ints: TypeAlias = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]

_DTYPES: dict[str, np.dtype[Any]] = {
    columns.UINT8: np.dtype("u1"),
    columns.INT32: np.dtype("<i4"),
    columns.INT64: np.dtype("<i8"),
}


def ints(kind: str, column: bytes, field: str, length: int | None = None) -> NDArray[np.int64]:
    """A column's elements as int64, so that sums and products of int32 elements do not overflow.

    Raises InvalidRequestError naming ``field`` unless it has ``length`` elements, where given.
    """
    dtype = _DTYPES[kind]
    num, rest = divmod(len(column), dtype.itemsize)
    if rest or (length is not None and num != length):
        columns.read(kind, column, field, length=length)  # raises
    elements: NDArray[np.int64] = np.frombuffer(column, dtype).astype(np.int64)
    return elements


def limits_of_tiers(num_blocks: Mapping[pb.Tier, int]) -> NDArray[np.int64]:
    """[256]: the number of blocks of each tier, by tier; -1 where there is no such tier."""
    limits = np.full(256, -1, np.int64)
    for tier, limit in num_blocks.items():
        limits[tier] = limit
    return limits


def check_groups(column: bytes, length: int, field: str) -> None:
    """Raise InvalidRequestError unless the column is empty or has ``length`` zeros: the pool's
    only layer group is 0.
    """
    if column:
        groups = ints(columns.UINT8, column, field, length)
        refuse(
            groups != 0,
            InvalidRequestError,
            lambda i: f"there is no layer group {groups[i]}: this pool has group 0 only",
            field,
        )


def refuse(bad: Mask, error: type[KvplaneError], message: Callable[[int], str], field: str) -> None:
    """Raise ``error`` naming the first element of ``field`` that is ``bad``, if there is one."""
    if bad.any():
        i = int(bad.argmax())
        raise error(message(i), field=f"{field}[{i}]")
