"""The blocks that a plan allocates: for its tables' entries, and for no table.

An allocation ends the block's generation: its publication is dropped, and table entries of that
generation become stale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.plan_columns import Mask
from data_plane.plans.tables.block_tables import BlockTables
from data_plane.plans.tables.change_columns import (
    AT_ALLOCATIONS,
    AT_CHANGES,
    BlockColumns,
    ChangeColumns,
)
from data_plane.tier_keys import TierKey
from kvplane.errors import StaleGenerationError

_MAX_GENERATION = 2**63 - 2


@dataclass(frozen=True, slots=True)
class Allocated:
    """The blocks of one tier that a plan allocates, ascending, with their new generations. A block
    allocated twice is listed twice, in the order of its generations.
    """

    blocks: NDArray[np.int64]
    generations: NDArray[np.int64]
    former_generations: NDArray[np.int64]
    """The generation of each block before the allocation."""

    def begins(self, blocks: NDArray[np.int64], generations: NDArray[np.int64]) -> Mask:
        """Return which of ``blocks`` the plan allocates with the generation given."""
        return self._has(self.generations, blocks, generations)

    def ends(self, blocks: NDArray[np.int64], generations: NDArray[np.int64]) -> Mask:
        """Return which of ``blocks`` had the generation given before the plan allocates them."""
        return self._has(self.former_generations, blocks, generations)

    def before(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each block's generation before the plan; -1 for one not allocated."""
        at = np.minimum(np.searchsorted(self.blocks, blocks), len(self.blocks) - 1)
        return np.where(self.blocks[at] == blocks, self.former_generations[at], -1)

    def _has(
        self,
        own: NDArray[np.int64],
        blocks: NDArray[np.int64],
        generations: NDArray[np.int64],
    ) -> Mask:
        at = np.searchsorted(self.blocks, blocks)
        end = np.searchsorted(self.blocks, blocks, side="right")
        found = np.zeros(len(blocks), np.bool_)
        while (left := np.flatnonzero(at < end)).size:  # once, but for blocks allocated twice
            found[left] |= own[at[left]] == generations[left]
            at += 1
        return found


AllocatedBlocks = dict[TierKey, Allocated]
"""The blocks that a plan allocates, by tier key; a tier without any is left out."""


class NewBlocks:
    """Collects the blocks that a plan allocates: first the entries that its changes allocate, then
    blocks for no table. A block that occurs twice is allocated in this order.
    """

    def __init__(self, changes: ChangeColumns, others: BlockColumns) -> None:
        self._entries = np.flatnonzero(changes.allocated)
        of_tables = changes.entries
        self._tier_keys = np.concatenate((of_tables.tier_keys[self._entries], others.tier_keys))
        self._blocks = np.concatenate((of_tables.blocks[self._entries], others.blocks))
        self._generations = np.concatenate(
            (of_tables.generations[self._entries], others.generations)
        )

    def allocate(self, tables: BlockTables) -> AllocatedBlocks:
        """Give the blocks their new generations in ``tables``. Raises StaleGenerationError unless
        each generation is above the one before.
        """
        allocated: AllocatedBlocks = {}
        for tier_key in tables.generations:
            of_tier = np.flatnonzero(self._tier_keys == tier_key)
            if len(of_tier):
                allocated[tier_key] = self._allocate_in(tables, tier_key, of_tier)
        return allocated

    def _allocate_in(
        self, tables: BlockTables, tier_key: TierKey, of_tier: NDArray[np.int64]
    ) -> Allocated:
        present = tables.generations[tier_key]
        order = of_tier[np.argsort(self._blocks[of_tier], kind="stable")]
        blocks, generations = self._blocks[order], self._generations[order]
        former = present[blocks]
        again = np.flatnonzero(blocks[1:] == blocks[:-1]) + 1
        former[again] = generations[again - 1]
        bad = (generations <= former) | (generations > _MAX_GENERATION)
        if bad.any():
            i = int(order[bad].min())
            block = self._blocks[i]
            raise StaleGenerationError(
                f"block {block} has generation {present[block]}, but the plan has "
                f"{self._generations[i]}: a plan that allocates the block has to set a higher one",
                field=self._field(i),
            )
        tables.allocate(tier_key, blocks, generations)
        return Allocated(blocks, generations, former)

    def field_of(self, tier_key: TierKey, block: int) -> str:
        """Return the field of the plan that allocates a block, the last one if several do."""
        found = np.flatnonzero((self._tier_keys == tier_key) & (self._blocks == block))
        return self._field(int(found[-1]))

    def _field(self, i: int) -> str:
        if i < len(self._entries):
            return f"{AT_CHANGES}.generations[{self._entries[i]}]"
        return f"{AT_ALLOCATIONS}.generations[{i - len(self._entries)}]"
