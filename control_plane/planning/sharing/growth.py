"""How many blocks sequences may take as they grow, and why they cannot have them yet."""

from __future__ import annotations

from typing import Final

from kvplane_blocks import GroupedPool, _native
from kvplane_blocks import Pool as NativePool

from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64

_ONES: Final = columns.pack(INT32, [1] * 4096)


def most_growth(message: cpb.Append, block_size_tokens: int) -> int:
    """No append takes more blocks than this, as far as can be said without a look at it."""
    num = columns.count(INT64, message.sequence_ids)
    if message.num_slots == _ONES[: 4 * num] and not message.num_lookahead_slots:
        return 2 * num
    num_slots = sum(
        sum(columns.read(INT32, column, name))
        for name, column in (
            ("num_slots", message.num_slots),
            ("num_lookahead_slots", message.num_lookahead_slots),
        )
    )
    return 2 * num + num_slots // block_size_tokens


def lacking(
    native: NativePool | GroupedPool, slot: int, num_needed: int
) -> tuple[int, int, int, int]:
    """The failure of growth that has to wait for device blocks, without its item."""
    num_obtainable = native.num_obtainable(slot, tpb.TIER_DEVICE)
    _, num_free, num_cached, _, _ = native.usage(tpb.TIER_DEVICE)
    num_without_floors = num_free + num_cached + native.num_own_retired(slot, tpb.TIER_DEVICE)
    lacks_floors_only = num_obtainable < num_needed <= num_without_floors
    code = _native.LATER_FLOOR if lacks_floors_only else _native.LATER
    return code, num_needed, num_obtainable, tpb.TIER_DEVICE
