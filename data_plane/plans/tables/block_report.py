"""The report from which a control plane learns the state of the blocks before it plans."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from data_plane.places import group_of, place_of, tier_of
from data_plane.plans.tables.block_tables import BlockTables
from kvplane.v1 import control_pb2
from kvplane.v1 import types_pb2 as pb

Parts: TypeAlias = list[control_pb2.BlockReport]


def block_report(tables: BlockTables, blocks_per_part: int) -> Parts:
    """Generations of all blocks that were ever allocated, then all publications; up to
    ``blocks_per_part`` in a part. At least one part; the last one has ``last`` set.
    """
    parts = []
    for place, generations in tables.generations.items():
        allocated = np.flatnonzero(generations > 0)
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
        present = tables.generations[place_of(group, pb.TIER_DEVICE)]
        parts += [
            control_pb2.BlockReport(publications=[message])
            for message in publications.report(present, blocks_per_part)
        ]
    if not parts:
        parts.append(control_pb2.BlockReport())
    parts[-1].last = True
    return parts
