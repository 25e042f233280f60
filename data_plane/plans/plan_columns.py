"""A plan's columns as numpy arrays, and checks of whole columns at once.

A plan may have thousands of blocks and spans, so nothing here makes an object for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_plane.tier_keys import TIERS, TierKey, group_of, no_group
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.wire import columns
from kvplane.wire.v1 import types_pb2 as pb

Mask: TypeAlias = NDArray[np.bool_]

_DTYPES: dict[str, np.dtype[Any]] = {
    columns.UINT8: np.dtype("u1"),
    columns.INT32: np.dtype("<i4"),
    columns.INT64: np.dtype("<i8"),
}


def ints(kind: str, column: bytes, field: str, length: int | None = None) -> NDArray[np.int64]:
    """Parse a column to int64, so that sums and products of int32 do not overflow.

    Raises InvalidRequestError naming ``field`` unless it has ``length`` elements, where given.
    """
    dtype = _DTYPES[kind]
    num, rest = divmod(len(column), dtype.itemsize)
    if rest or (length is not None and num != length):
        columns.read(kind, column, field, length=length)  # raises
    elements: NDArray[np.int64] = np.frombuffer(column, dtype).astype(np.int64)
    return elements


def limits_of_tiers(num_blocks: Mapping[TierKey, int]) -> NDArray[np.int64]:
    """Return [256]: each tier's number of blocks, by tier key; -1 where there is no tier."""
    limits = np.full(256, -1, np.int64)
    for tier_key, limit in num_blocks.items():
        limits[tier_key] = limit
    return limits


def read_groups(
    column: bytes, length: int, num_blocks: Mapping[TierKey, int], field: str
) -> NDArray[np.int64]:
    """Return [length]: the layer group of each element; an empty column means that all are 0.
    ``num_blocks``: of each tier. Raises InvalidRequestError for a group that does not exist.
    """
    if not column:
        return np.zeros(length, np.int64)
    groups, last = ints(columns.UINT8, column, field, length), group_of(max(num_blocks))
    refuse(
        groups > last,
        InvalidRequestError,
        lambda i: no_group(int(groups[i]), last),
        field,
    )
    return groups


def tier_keys(tiers: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tier key for each element's tier and group; 0, which is no key, for no tier."""
    is_tier = (tiers == pb.TIER_DEVICE) | (tiers == pb.TIER_HOST)
    return np.where(is_tier, len(TIERS) * groups + tiers, 0)


def refuse(bad: Mask, error: type[KvplaneError], message: Callable[[int], str], field: str) -> None:
    """Raise ``error`` for the first element of ``field`` that is ``bad``, if there is one."""
    if bad.any():
        i = int(bad.argmax())
        raise error(message(i), field=f"{field}[{i}]")
