"""A data plane's metadata, and what may happen to it between a report made ahead and the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.control_plane import messages
from data_plane.block_digests import BlockDigests
from data_plane.commands import Commands
from data_plane.counters import ExecutorCounters
from data_plane.kernels.device.cuda_streams import HostStreams
from data_plane.kernels.device.device_watch import DeviceWatch
from data_plane.plans.tables.block_report import block_report
from data_plane.plans.tables.block_tables import BlockTables
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire.block_digests import RANGE_BLOCKS

_DEVICE = tpb.TIER_DEVICE
_SHARE = 0.01


class Plane:
    """What a data plane knows of its blocks, with the calls of an executor."""

    def __init__(self, num_blocks: int, parts: list[cpb.RegisterRequest]) -> None:
        self.num_blocks = num_blocks
        tables = BlockTables({_DEVICE: num_blocks, tpb.TIER_HOST: 0}, messages.BLOCK_SIZE_TOKENS)
        for part in parts:
            for blocks in part.report.blocks:
                numbers = np.frombuffer(blocks.indices, "<i4")
                tables.generations[_DEVICE][numbers] = np.frombuffer(blocks.generations, "<i8")
            for told in part.report.publications:
                tables.publications[0].keep(told, tables.generations[_DEVICE], "publications")
        self._tables = tables
        commands = Commands(ExecutorCounters(), DeviceWatch(HostStreams()), None)
        self.digests = BlockDigests(tables, commands)
        self.hello = messages.hello(num_blocks, 0)

    def report(
        self, blocks_per_part: int, among: list[cpb.BlockRanges] | None = None
    ) -> list[cpb.BlockReport]:
        return block_report(self._tables, blocks_per_part, among)

    def allocate(self, blocks: list[int]) -> None:
        """Allocate these again: their publications are dropped."""
        chosen = np.array(sorted(blocks), np.int64)
        generations = self._tables.generations[_DEVICE][chosen] + 1
        self._tables.allocate(_DEVICE, chosen, generations)


def nothing(plane: Plane) -> None:
    """Equal."""


def some_ranges(plane: Plane) -> None:
    """A block in each of some ranges."""
    num_ranges = plane.num_blocks // RANGE_BLOCKS
    chosen = Random(1).sample(range(num_ranges), max(1, int(_SHARE * num_ranges)))
    plane.allocate([number * RANGE_BLOCKS for number in chosen])


def some_blocks(plane: Plane) -> None:
    """Blocks anywhere."""
    num = max(1, int(_SHARE * plane.num_blocks))
    plane.allocate(Random(1).sample(range(plane.num_blocks), num))


CASES: dict[str, Callable[[Plane], None] | None] = {
    "all": None,
    "equal": nothing,
    "1 % of the ranges": some_ranges,
    "1 % of the blocks": some_blocks,
}


@dataclass
class Figures:
    """``plane_s`` and ``longest_s``: see the docstring of ``__main__``."""

    seconds: float = 0.0
    num_bytes: int = 0
    plane_s: float = 0.0
    longest_s: float = 0.0
    num_cached: int = 0
