"""The checkpoints of states that a plan's spans write.

A span's table of states has a block for each position, inside of what the span computes, after
which the plan keeps a checkpoint. Callers write its pages; the plan has run once all are written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.batches.attention_batch import AttentionBatch
from data_plane.plans.progress import Progress
from data_plane.plans.tables.block_tables import BlockTables
from data_plane.tier_keys import tier_key_of
from kvplane.errors import InvalidRequestError
from kvplane.wire.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of a plan, in columns. Each has a block, which is written whole."""

    group: int
    sequence_ids: NDArray[np.int64]
    entries: NDArray[np.int64]
    """The place of each in its sequence's table."""
    written_blocks: NDArray[np.int64]
    num_written: NDArray[np.int64]
    """For each of ``written_blocks``, its number of slots: all count as written."""
    written_by: NDArray[np.int64]
    """For each of ``written_blocks``, its index here."""
    progress: Progress
    """Which checkpoints are written, in which of the shard's layers of the group."""

    def find(self, sequence_id: int, entry: int, at: int) -> int:
        """Return the index of a checkpoint. ``at``: its index in the request, for the error: raises
        InvalidRequestError if the plan keeps none there.
        """
        found = np.flatnonzero((self.sequence_ids == sequence_id) & (self.entries == entry))
        if not len(found):
            raise InvalidRequestError(
                f"the plan keeps no checkpoint of sequence {sequence_id} at the end of block "
                f"{entry}",
                field=f"entries[{at}]",
            )
        return int(found[0])


def prepare_checkpoints(
    tables: BlockTables, session_id: int, spans: AttentionBatch, num_layers: int
) -> Checkpoints | None:
    """Find the checkpoints of a plan's ``spans``; None where its pool keeps no states.
    ``num_layers``: of the group, in this shard.
    """
    group = tables.state_group
    if group is None:
        return None
    device, size = tier_key_of(group, pb.TIER_DEVICE), tables.block_size_tokens
    of_session = tables.of_session(session_id, group)
    begins = spans.first_positions // size
    ends = (spans.first_positions + np.diff(spans.starts)) // size
    found: list[tuple[int, int, int]] = []
    for span in np.flatnonzero(ends > begins).tolist():
        sequence_id = int(spans.sequence_ids[span])
        table = of_session.get(sequence_id)
        if table is None or table.tier_key != device:
            continue
        begin = int(begins[span])
        held = np.flatnonzero(table.generations[begin : int(ends[span])]) + begin
        found += [(sequence_id, entry, int(table.blocks[entry])) for entry in held.tolist()]
    ids, entries, blocks = np.array(found, np.int64).reshape(-1, 3).T
    num = len(found)
    return Checkpoints(
        group,
        ids,
        entries,
        np.ascontiguousarray(blocks),
        np.full(num, size),
        np.arange(num),
        Progress(num_layers, np.ones(num, np.int64)),
    )
