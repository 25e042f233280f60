"""The report from which a control plane learns the state of the blocks before it plans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_plane.places import TIERS, Place, group_of, place_of, tier_of
from data_plane.plans.plan_columns import ints
from data_plane.plans.tables.block_tables import BlockTables
from kvplane.errors import InvalidRequestError
from kvplane.v1 import control_pb2
from kvplane.v1 import types_pb2 as pb
from kvplane.wire import block_digests, columns

_NONE: Final = np.zeros(0, np.int64)
Ranges: TypeAlias = Iterable[control_pb2.BlockRanges]
"""Some blocks, as a control plane names them."""
Parts: TypeAlias = list[control_pb2.BlockReport]


def block_report(tables: BlockTables, blocks_per_part: int, ranges: Ranges | None = None) -> Parts:
    """Generations of all blocks that were ever allocated, then all publications; or those of the
    blocks in ``ranges`` alone; up to ``blocks_per_part`` in a part. At least one part; the last one
    has ``last`` set.

    Raises InvalidRequestError for ranges that are not there.
    """
    among = None if ranges is None else _blocks_of(ranges, tables)
    parts = []
    for place, generations in tables.generations.items():
        chosen = np.arange(len(generations)) if among is None else among.get(place, _NONE)
        allocated = chosen[generations[chosen] > 0]
        for begin in range(0, len(allocated), blocks_per_part):
            of_part = allocated[begin : begin + blocks_per_part]
            blocks = pb.Blocks(
                group=group_of(place),
                tier=tier_of(place),
                indices=of_part.astype("<i4").tobytes(),
                generations=generations[of_part].astype("<i8").tobytes(),
            )
            parts.append(control_pb2.BlockReport(blocks=[blocks]))
    for group, publications in enumerate(tables.publications):
        place = place_of(group, pb.TIER_DEVICE)
        present = tables.generations[place]
        only = None if among is None else among.get(place, _NONE)
        parts += [
            control_pb2.BlockReport(publications=[message])
            for message in publications.report(present, blocks_per_part, only)
        ]
    if not parts:
        parts.append(control_pb2.BlockReport())
    parts[-1].last = True
    return parts


def _blocks_of(ranges: Ranges, tables: BlockTables) -> dict[Place, NDArray[np.int64]]:
    """The blocks of ranges, ascending, by place."""
    found = {}
    for i, of_place in enumerate(ranges):
        place = place_of(of_place.group, of_place.tier)
        field = f"report_request.ranges[{i}]"
        if not (of_place.group >= 0 and of_place.tier in TIERS and place in tables.num_blocks):
            raise InvalidRequestError("is of no tier of this data plane", field=field)
        num_blocks = tables.num_blocks[place]
        numbers = np.unique(ints(columns.INT32, of_place.ranges, f"{field}.ranges"))
        end = block_digests.num_ranges(num_blocks)
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < end:
            raise InvalidRequestError("has a range that is not there", field=f"{field}.ranges")
        of_ranges = numbers[:, None] * block_digests.RANGE_BLOCKS + np.arange(
            block_digests.RANGE_BLOCKS
        )
        blocks = of_ranges.ravel()
        found[place] = blocks[blocks < num_blocks]
    return found
