"""Which blocks a plan may write: checked when the plan starts, and again before each of its writes.

A plan may write a block only if the block is published nowhere and no table but that of the plan's
own sequence refers to it. Either can stop holding while the plan runs: a late message publishes the
block, or another session's plan allocates it after the control plane took it back. Each write calls
``WriteChecks.check_may_write``, which looks at the tables only if they changed since its last look.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.batches.attention_batch import AT_SPANS, check_entries
from data_plane.plans.sessions import RunningPlan, Session
from data_plane.plans.tables.block_tables import BlockTables
from data_plane.tier_keys import tier_key_of
from kvplane.errors import BlockNotWritableError
from kvplane.wire.v1 import types_pb2 as pb


class Writes(Protocol):
    """Names what a plan writes in one layer group: its spans, or its checkpoints of states."""

    @property
    def group(self) -> int:
        """The layer group."""

    @property
    def sequence_ids(self) -> NDArray[np.int64]:
        """The sequences that are written."""

    @property
    def written_blocks(self) -> NDArray[np.int64]:
        """Device blocks written, each listed once for each of its writers."""

    @property
    def written_by(self) -> NDArray[np.int64]:
        """For each of ``written_blocks``, the index of its sequence."""


class WriteChecks:
    """Checks of running plans against the block tables of one executor."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables

    def check_may_write(self, session: Session, run: RunningPlan) -> None:
        """Check that a running plan may still write. Raises BlockNotWritableError if one of its
        written blocks was published since the plan started, and StaleGenerationError if a block of
        the spans' tables was allocated again.
        """
        self.check_still_current(session, run)
        self.check_still_writable(run)

    def check_still_current(self, session: Session, run: RunningPlan) -> None:
        """Check the spans' tables again if a plan made any entry stale since the last check."""
        if run.checked_taken != self._tables.num_taken:
            for batch in run.writes:
                check_current(self._tables, session.id, batch)
            run.checked_taken = self._tables.num_taken

    def check_still_writable(self, run: RunningPlan) -> None:
        """Check the written blocks again if anything was published since the last check."""
        if run.checked_version != self._tables.num_messages_published:
            for batch in run.writes:
                check_unpublished(self._tables, batch)
            run.checked_version = self._tables.num_messages_published


def check_current(tables: BlockTables, session_id: int, batch: Writes) -> None:
    """Raise StaleGenerationError if a block of a span's table has been allocated again."""
    of_session = tables.of_session(session_id, batch.group)
    found = [of_session[sequence_id] for sequence_id in batch.sequence_ids.tolist()]
    check_entries(tables, found, batch.sequence_ids)


def check_unpublished(tables: BlockTables, batch: Writes) -> None:
    """Raise BlockNotWritableError if a block to be written is published."""
    published = tables.publications[batch.group].published[batch.written_blocks]
    if published.any():
        raise _not_writable(batch, int(published.argmax()), "published")


def check_writable(
    tables: BlockTables, session_id: int, batch: Writes, changed_ids: NDArray[np.int64]
) -> None:
    """Raise BlockNotWritableError if a block to be written is published, or shared: if a table
    refers to it that this plan does not change, besides the writer's, or two spans write it.

    Tables that the plan makes may share what it computes: equal prompts are computed once.
    ``changed_ids``: the sequences whose tables the plan changes.
    """
    check_unpublished(tables, batch)
    blocks = batch.written_blocks
    device = tier_key_of(batch.group, pb.TIER_DEVICE)
    num_entries = tables.ref_counts[device][blocks]
    shared = num_entries != 1
    if not shared.any():
        return
    of_session = tables.of_session(session_id, batch.group)
    found = (of_session.get(i) for i in set(changed_ids.tolist()))
    held = [table.held for table in found if table is not None and table.tier_key == device]
    present = tables.generations[device]
    changed = [each.blocks[present[each.blocks] == each.generations] for each in held]
    counts = np.bincount(np.concatenate([*changed, blocks[:0]]), minlength=int(blocks.max()) + 1)
    writers = batch.sequence_ids[batch.written_by]
    counts = counts[blocks] + ~np.isin(writers, changed_ids)
    again = np.ones(len(blocks), np.bool_)
    again[np.unique(blocks, return_index=True)[1]] = False
    bad = shared & (again | (counts != num_entries))
    if bad.any():
        raise _not_writable(batch, int(bad.argmax()), "shared with another table")


def _not_writable(batch: Writes, i: int, why: str) -> BlockNotWritableError:
    return BlockNotWritableError(
        f"block {batch.written_blocks[i]} is {why} and may not be written: a plan has to copy it "
        "to a block of the sequence's own first",
        field=f"{AT_SPANS}.sequence_ids[{batch.written_by[i]}]",
    )
