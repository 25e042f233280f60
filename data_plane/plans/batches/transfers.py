"""A plan's block copies and swaps: checked, then cut into batches for the kernels.

The transfers of a plan run in order, and later ones may read blocks that earlier ones wrote.
Consecutive transfers of the same direction make one kernel call, which keeps their order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from data_plane.plans.plan_columns import (
    Mask,
    ints,
    limits_of_tiers,
    read_groups,
    refuse,
    tier_keys,
)
from data_plane.plans.tables.allocations import AllocatedBlocks
from data_plane.plans.tables.block_tables import BlockTables
from data_plane.tier_keys import TIERS, TierKey
from kvplane.errors import InvalidRequestError, StaleGenerationError
from kvplane.wire import columns
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb

_AT = "plan.transfers"
_MAX_TIER_KEYS = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive transfers of one direction, which make one kernel call."""

    source: TierKey
    destination: TierKey
    pairs: torch.Tensor
    """[num_blocks, 2] int64, CPU: source index, destination index."""


@dataclass(frozen=True, slots=True)
class TransferEnds:
    """Columns of the blocks that transfers read, or write; an element for each transfer."""

    tier_keys: NDArray[np.int64]
    blocks: NDArray[np.int64]
    generations: NDArray[np.int64]

    @property
    def tiers(self) -> NDArray[np.int64]:
        """Return the tier of each block."""
        return (self.tier_keys - 1) % len(TIERS) + 1

    @property
    def keys(self) -> NDArray[np.int64]:
        """Return a number for each block that is unique over all tiers and layer groups."""
        return self.blocks * _MAX_TIER_KEYS + self.tier_keys


_NONE = TransferEnds(*(np.zeros(0, np.int64) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Transfers:
    """The columns of ``plan.transfers``, each checked by itself."""

    sources: TransferEnds
    destinations: TransferEnds

    @classmethod
    def read(cls, num_blocks: dict[TierKey, int], message: plan_pb2.Transfers) -> Transfers:
        """Parse and check the columns. ``num_blocks``: of each tier. Raises InvalidRequestError."""
        if not message.ByteSize():
            return cls(_NONE, _NONE)
        sources = _read_ends(
            num_blocks,
            "source",
            message.groups,
            message.source_tiers,
            message.source_indices,
            message.source_generations,
            None,
        )
        num = len(sources.blocks)
        destinations = _read_ends(
            num_blocks,
            "destination",
            message.groups,
            message.destination_tiers,
            message.destination_indices,
            message.destination_generations,
            num,
        )
        same_tier = sources.tiers == destinations.tiers
        refuse(
            same_tier & (sources.tiers == pb.TIER_HOST),
            InvalidRequestError,
            lambda i: "blocks cannot be copied inside the host tier",
            f"{_AT}.destination_tiers",
        )
        refuse(
            same_tier & (sources.blocks == destinations.blocks),
            InvalidRequestError,
            lambda i: "a block cannot be copied to itself",
            f"{_AT}.destination_indices",
        )
        return cls(sources, destinations)

    def __len__(self) -> int:
        return len(self.sources.blocks)

    def check_generations(self, tables: BlockTables, allocated: AllocatedBlocks) -> None:
        """Check the transfers against the tables after the plan's changes. Raises
        StaleGenerationError for a destination that the plan does not allocate, for a source of
        another generation, and for a source whose content is not the expected one when its turn
        comes.

        A source need not be in a table. One that the plan allocates may be read as it was before
        the plan, until a transfer overwrites it; evicted blocks are saved like this.
        """
        if not len(self):
            return
        present, of_plan = _look_up(self.sources, tables, allocated)
        is_former = self.reads_former(allocated)
        refuse(
            ~of_plan & ~is_former & ((self.sources.generations != present) | (present < 1)),
            StaleGenerationError,
            lambda i: (
                f"block {self.sources.blocks[i]} has generation {present[i]}, but the plan has "
                f"{self.sources.generations[i]}: it has been allocated again since, or never was"
            ),
            f"{_AT}.source_generations",
        )
        _, of_plan = _look_up(self.destinations, tables, allocated)
        refuse(
            ~of_plan,
            StaleGenerationError,
            lambda i: (
                f"block {self.destinations.blocks[i]} is not allocated by this plan with this "
                "generation, so it may hold data that is still needed"
            ),
            f"{_AT}.destination_generations",
        )
        if is_former.any():
            self._check_turns(is_former)

    def reads_former(self, allocated: AllocatedBlocks) -> Mask:
        """Return which transfers read blocks that the plan allocates as they were before it."""
        is_former = np.zeros(len(self), np.bool_)
        if not len(self):
            return is_former
        for tier_key, new in allocated.items():
            of_tier = np.flatnonzero(self.sources.tier_keys == tier_key)
            generations = self.sources.generations[of_tier]
            before = new.before(self.sources.blocks[of_tier])
            is_former[of_tier] = (generations == before) & (generations >= 1)
        return is_former

    def _check_turns(self, is_former: Mask) -> None:
        """Check, for blocks that are read as they were before the plan, that former contents are
        read only before a transfer overwrites the block, and new contents only afterwards.
        """
        sources = self.sources.keys
        written, first = np.unique(self.destinations.keys, return_index=True)
        at = np.minimum(np.searchsorted(written, sources), len(written) - 1)
        was_written = (written[at] == sources) & (first[at] < np.arange(len(self)))
        bad = np.isin(sources, sources[is_former]) & (is_former == was_written)
        refuse(
            bad,
            StaleGenerationError,
            lambda i: (
                f"block {self.sources.blocks[i]} has been overwritten by an earlier transfer"
                if is_former[i]
                else f"block {self.sources.blocks[i]} has not been written by an earlier transfer"
            ),
            f"{_AT}.source_generations",
        )

    def batches(self) -> list[Batch]:
        """Return the transfers as batches for the kernels, to be run in order."""
        if not len(self):
            return []
        sources, destinations = self.sources, self.destinations
        pairs = np.stack((sources.blocks, destinations.blocks), axis=1)
        turns = np.flatnonzero(
            (np.diff(sources.tier_keys) != 0) | (np.diff(destinations.tier_keys) != 0)
        )
        bounds = [0, *(turns + 1).tolist(), len(self)]
        return [
            Batch(
                int(sources.tier_keys[begin]),
                int(destinations.tier_keys[begin]),
                torch.from_numpy(pairs[begin:end]),
            )
            for begin, end in itertools.pairwise(bounds)
        ]


def _look_up(
    ends: TransferEnds, tables: BlockTables, allocated: AllocatedBlocks
) -> tuple[NDArray[np.int64], Mask]:
    """Return blocks' present generations, and which the plan allocates with those in ``ends``."""
    present = np.zeros(len(ends.blocks), np.int64)
    of_plan = np.zeros(len(ends.blocks), np.bool_)
    for tier_key, generations in tables.generations.items():
        of_tier = np.flatnonzero(ends.tier_keys == tier_key)
        blocks = ends.blocks[of_tier]
        present[of_tier] = generations[blocks]
        if tier_key in allocated:
            of_plan[of_tier] = allocated[tier_key].begins(blocks, ends.generations[of_tier])
    return present, of_plan


def _read_ends(
    num_blocks: dict[TierKey, int],
    name: str,
    groups_column: bytes,
    tiers_column: bytes,
    indices_column: bytes,
    generations_column: bytes,
    length: int | None,
) -> TransferEnds:
    tiers = ints(columns.UINT8, tiers_column, f"{_AT}.{name}_tiers", length)
    groups = read_groups(groups_column, len(tiers), num_blocks, f"{_AT}.groups")
    limits, in_tiers = limits_of_tiers(num_blocks), tier_keys(tiers, groups)
    refuse(
        limits[in_tiers] < 0,
        InvalidRequestError,
        lambda i: f"{tiers[i]} is not a tier",
        f"{_AT}.{name}_tiers",
    )
    blocks = ints(columns.INT32, indices_column, f"{_AT}.{name}_indices", len(tiers))
    refuse(
        (blocks < 0) | (blocks >= limits[in_tiers]),
        InvalidRequestError,
        lambda i: (
            f"there is no block {blocks[i]} in this tier, which has {limits[in_tiers[i]]} blocks"
        ),
        f"{_AT}.{name}_indices",
    )
    generations = ints(columns.INT64, generations_column, f"{_AT}.{name}_generations", len(tiers))
    return TransferEnds(in_tiers, blocks, generations)


def num_copied_and_swapped(message: plan_pb2.Transfers) -> tuple[int, int]:
    """Return how many blocks a plan's transfers copy inside the device tier, and how many they swap
    between the tiers. The columns are those of a plan that was started, so they were checked.
    """
    tiers = message.source_tiers, message.destination_tiers
    sources, destinations = (np.frombuffer(column, np.uint8) for column in tiers)
    num_swapped = int(np.count_nonzero(sources != destinations))
    return len(sources) - num_swapped, num_swapped
