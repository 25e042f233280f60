"""Counts the slots written in each block's present generation: the ones that a session may read.

    plan starts ──► its blocks are allocated, nothing written ──► transfers copy ──► spans complete

A table refers to blocks that its session allocated, or that it found as a prefix or shares with a
fork, which the same tenant wrote. So slots written in the present generation are the session's own
or cached; the others may hold an earlier owner's data. Slots are written from a block's first on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kvplane_kernels import note_written
from numpy.typing import NDArray

from data_plane.plans.batches.attention_batch import AttentionBatch
from data_plane.plans.batches.checkpoints import Checkpoints
from data_plane.plans.batches.transfers import Transfers
from data_plane.plans.tables.block_tables import BlockTables, Table
from data_plane.tier_keys import TierKey, tier_key_of
from kvplane.wire.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class SlotsToWrite:
    """The blocks of one layer group that a plan's spans write, with their generations."""

    tier_key: TierKey
    blocks: NDArray[np.int64]
    num_slots: NDArray[np.int64]
    """How many leading slots of each block are written once the plan has run."""
    generations: NDArray[np.int64]


class WrittenSlots:
    """Counts the written slots of all blocks of one data plane, in ``BlockTables.num_written``."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables

    def of_sources(self, transfers: Transfers) -> NDArray[np.int64]:
        """Return [num_transfers]: slots written in each source. Called before a plan's changes."""
        counts = np.zeros(len(transfers), np.int64)
        sources = transfers.sources
        for tier_key, num_written in self._tables.num_written.items():
            of_tier = sources.tier_keys == tier_key
            if of_tier.any():
                counts[of_tier] = num_written[sources.blocks[of_tier]]
        return counts

    def copy(self, transfers: Transfers, of_sources: NDArray[np.int64]) -> None:
        """Record that transfers have copied written slots. ``of_sources``: that method's result."""
        if not len(transfers):
            return
        sources, destinations = transfers.sources.keys, transfers.destinations.keys
        if np.isin(sources, destinations).any():  # one reads a block that another writes
            counts = dict(zip(sources.tolist(), of_sources.tolist(), strict=True))
            moved = []
            for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
                moved.append(counts[source])
                counts[destination] = counts[source]
            of_sources = np.array(moved, np.int64)
        ends = transfers.destinations
        for tier_key, num_written in self._tables.num_written.items():
            of_tier = ends.tier_keys == tier_key
            if of_tier.any():
                num_written[ends.blocks[of_tier]] = of_sources[of_tier]

    def to_write(self, batches: Sequence[AttentionBatch | Checkpoints]) -> tuple[SlotsToWrite, ...]:
        """Return the slots that the spans of a plan, which starts now, will write."""
        if not len(batches[0].sequence_ids):
            return ()
        return tuple(
            SlotsToWrite(
                tier_key := tier_key_of(batch.group, pb.TIER_DEVICE),
                batch.written_blocks,
                batch.num_written,
                self._tables.generations[tier_key][batch.written_blocks],
            )
            for batch in batches
        )

    def add(self, written: Sequence[SlotsToWrite]) -> None:
        """Record the slots that a plan has written, except in blocks allocated again since."""
        tables = self._tables
        for each in written:
            tier_key = each.tier_key
            note_written(
                *(tables.num_written[tier_key], tables.generations[tier_key]),
                *(each.blocks, each.num_slots, each.generations),
            )

    def of_table(
        self, part: Table, entries: NDArray[np.int64], num_tokens: int
    ) -> NDArray[np.int64]:
        """Return [num_blocks]: how many leading slots of each entry of ``part`` may be read. These
        are ``entries`` of a table. ``num_tokens``: the sequence's tokens that are written if the
        plan that writes them still runs; 0 for none.
        """
        counts = self._tables.num_written[part.tier_key][part.blocks].astype(np.int64)
        block_size = self._tables.block_size_tokens
        begins = entries * block_size
        return np.maximum(counts, np.clip(num_tokens - begins, 0, block_size))
