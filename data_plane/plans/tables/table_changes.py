"""Applies a plan's changes to the block tables, checking every field and every generation.

Entries of all changes are checked and counted as whole columns; the loop over changes only
assembles tables. A plan may allocate a block that its own session still refers to, or allocate one
twice, as long as none of the session's tables refers to a former generation after all changes.

Runs inside ``BlockTables.transaction``, which undoes the changes of a plan that fails half way.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from data_plane.plans.plan_columns import refuse
from data_plane.plans.tables.allocations import AllocatedBlocks, NewBlocks
from data_plane.plans.tables.block_tables import BlockTables, Table, no_table
from data_plane.plans.tables.change_columns import (
    AT_CHANGES,
    DROP,
    FORK,
    KEEP,
    MAX_ENTRIES,
    MAX_TRIMMED_ENTRIES,
    REPLACE,
    SET,
    TRUNCATE,
    ChangeColumns,
    read_allocations,
)
from data_plane.tier_keys import TierKey, group_of
from kvplane.errors import InvalidRequestError, SequenceNotFoundError, StaleGenerationError
from kvplane.wire.plane.v1 import plan_pb2


def apply_changes(tables: BlockTables, session_id: int, plan: plan_pb2.Plan) -> AllocatedBlocks:
    """Apply ``plan.changes`` in order, and ``plan.allocations``. Returns the blocks that the plan
    allocates.

    Raises InvalidRequestError, SequenceNotFoundError and StaleGenerationError, each naming its
    field.
    """
    if not (plan.resync or plan.changes.ByteSize() or plan.allocations.ByteSize()):
        return {}  # as in most decode steps
    changes = ChangeColumns.read(tables.num_blocks, plan.changes, tables.state_group)
    new = NewBlocks(changes, read_allocations(tables.num_blocks, plan.allocations))
    allocated = new.allocate(tables)
    _check_generations(tables, changes, allocated)
    _Changer(tables, session_id, changes).run(resync=plan.resync)
    _check_own_tables(tables, session_id, new, allocated)
    return allocated


def _check_generations(
    tables: BlockTables, changes: ChangeColumns, allocated: AllocatedBlocks
) -> None:
    """Check that each entry that the plan does not allocate has the block's present generation, or
    a former one of a block that this plan allocates.
    """
    entries, is_kept = changes.entries, ~changes.allocated
    if changes.is_hole is not None:
        is_kept &= ~changes.is_hole
    others = np.flatnonzero(is_kept)
    if not len(others):
        return
    present = np.zeros(len(entries), np.int64)
    bad = np.zeros(len(entries), np.bool_)
    for tier_key, generations in tables.generations.items():
        of_tier = others[entries.tier_keys[others] == tier_key]
        blocks, has = entries.blocks[of_tier], entries.generations[of_tier]
        present[of_tier] = generations[blocks]
        is_bad = has != present[of_tier]
        if tier_key in allocated and is_bad.any():
            is_bad &= ~allocated[tier_key].ends(blocks, has)
        bad[of_tier] = is_bad | (has < 1)
    refuse(
        bad,
        StaleGenerationError,
        lambda i: (
            f"block {entries.blocks[i]} has generation {present[i]}, but the plan has "
            f"{entries.generations[i]}: it has been allocated again since, or never was"
        ),
        f"{AT_CHANGES}.generations",
    )


class _Counts:
    """Counts, by tier key, the additional uses of tables and parts of tables after the plan."""

    def __init__(self) -> None:
        self._of_tier: dict[TierKey, Counter[Table]] = defaultdict(Counter)

    def add(self, table: Table | None, num: int = 1) -> None:
        if table is not None:
            self._of_tier[table.tier_key][table] += num

    def apply(self, tables: BlockTables) -> None:
        for tier_key, counts in self._of_tier.items():
            tables.add_references(tier_key, counts)


class _Changer:
    """Builds the changed tables of one session, and counts their entries."""

    def __init__(self, tables: BlockTables, session_id: int, changes: ChangeColumns) -> None:
        self._tables = tables
        self._session_id = session_id
        self._changes = changes
        self._counts = _Counts()
        self._before: dict[tuple[int, int], Table] = {}  # by group and sequence, of a resync
        self._num_forks = 0
        self._num_copied = 0
        # Equal forks of a table share one prefix, so that many cost as little as one.
        self._prefixes: dict[tuple[Table, int], Table] = {}

    def run(self, *, resync: bool) -> None:
        if resync:
            for group in range(self._tables.num_groups):
                of_group = self._tables.of_session(self._session_id, group)
                for sequence_id, table in list(of_group.items()):
                    self._tables.put(self._session_id, sequence_id, None, group)
                    self._counts.add(table, -1)
                    self._before[group, sequence_id] = table
        changes, entries = self._changes, self._changes.entries
        blocks, end = entries.blocks.astype(np.int32), 0
        for i, (kind, sequence_id, group, tier_key, first, num) in enumerate(
            zip(
                changes.kinds.tolist(),
                changes.sequence_ids.tolist(),
                changes.groups.tolist(),
                changes.tier_keys.tolist(),
                changes.first_blocks.tolist(),
                changes.num_blocks.tolist(),
                strict=True,
            )
        ):
            old = self._tables.of_session(self._session_id, group).get(sequence_id)
            made: Table | None
            if kind <= REPLACE:
                begin, end = end, end + num
                part = Table(
                    tier_key,
                    blocks[begin:end],
                    entries.generations[begin:end],
                    has_holes=group == self._tables.state_group,
                )
                make = self._set if kind == SET else self._replace
                made = make(old, part, first, i)
            elif kind == FORK:
                made = self._fork(sequence_id, group, num, i)
                self._counts.add(made)
                self._counts.add(old, -1)
            elif kind == KEEP:
                made = self._keep(resync, group, sequence_id, num, i)
                self._counts.add(old, -1)
            elif old is None:
                at = f"{AT_CHANGES}.sequence_ids[{i}]"
                raise SequenceNotFoundError(no_table(sequence_id), field=at)
            else:
                made = self._shorten(old, kind, num, i)
            self._tables.put(self._session_id, sequence_id, made, group)
        self._counts.apply(self._tables)

    def _set(self, old: Table | None, part: Table, first: int, i: int) -> Table:
        """Return the old table with ``part`` in place of its entries from ``first`` on."""
        if old is None:
            old = Table(part.tier_key, part.blocks[:0], part.generations[:0])
        length = len(old.blocks)
        if old.tier_key != part.tier_key:
            raise InvalidRequestError(
                "the table is in the other tier: only REPLACE may change it",
                field=f"{AT_CHANGES}.tiers[{i}]",
            )
        if not old.num_trimmed <= first <= length:
            raise InvalidRequestError(
                f"must be {old.num_trimmed} to {length}, the first entry that was not trimmed and "
                f"the length of the table, is {first}",
                field=f"{AT_CHANGES}.first_blocks[{i}]",
            )
        end = first + len(part.blocks)
        self._check_length(part.tier_key, max(end, length), old.num_trimmed, i)
        self._counts.add(part)
        if first < length:
            # A copy, so that not every former table is kept until the plan has been read.
            self._counts.add(old.part(first, end).copy(), -1)
        return Table(
            part.tier_key,
            np.concatenate((old.blocks[:first], part.blocks, old.blocks[end:])),
            np.concatenate((old.generations[:first], part.generations, old.generations[end:])),
            old.num_trimmed,
            part.has_holes,
        )

    def _replace(self, old: Table | None, part: Table, first: int, i: int) -> Table:
        """Return a table of ``first`` trimmed entries, followed by those of ``part``."""
        self._check_length(part.tier_key, first + len(part.blocks), first, i)
        self._counts.add(old, -1)
        self._counts.add(part)
        hole = np.zeros(first, np.int32)
        return Table(
            part.tier_key,
            np.concatenate((hole, part.blocks)),
            np.concatenate((hole, part.generations)),
            first,
            part.has_holes,
        )

    def _check_length(self, tier_key: TierKey, length: int, num_trimmed: int, i: int) -> None:
        most = min(MAX_ENTRIES, num_trimmed + self._tables.num_blocks[tier_key])
        if group_of(tier_key) == self._tables.state_group:
            most = MAX_ENTRIES  # most of them have no block
        if length > most:
            raise InvalidRequestError(
                f"the table would have {length} entries, {num_trimmed} of them trimmed, and may "
                f"have {most}: as many more as there are blocks in its tier, and {MAX_ENTRIES} in "
                "all",
                field=f"{AT_CHANGES}.num_blocks[{i}]",
            )

    def _copy(self, num_entries: int, i: int) -> None:
        """Bound the entries that trims copy: a few bytes of a plan must not take gigabytes."""
        self._num_copied += num_entries
        if self._num_copied > MAX_TRIMMED_ENTRIES:
            raise InvalidRequestError(
                f"the tables that the plan trims have more than {MAX_TRIMMED_ENTRIES} entries in "
                "all: trim fewer of them in one plan",
                field=f"{AT_CHANGES}.num_blocks[{i}]",
            )

    def _fork(self, sequence_id: int, group: int, num_blocks: int, i: int) -> Table:
        """Return a fork's table: the first ``num_blocks`` entries of its parent's table."""
        parent_id = int(self._changes.parents[self._num_forks])
        at = f"{AT_CHANGES}.parent_sequence_ids[{self._num_forks}]"
        self._num_forks += 1
        if parent_id == sequence_id:
            raise InvalidRequestError("a sequence cannot be forked from itself", field=at)
        parent = self._tables.get(self._session_id, parent_id, at, group)
        return self._prefix(parent, num_blocks, i)

    def _keep(self, resync: bool, group: int, sequence_id: int, num_blocks: int, i: int) -> Table:
        """Return the first ``num_blocks`` entries of the sequence's table before the plan."""
        if not resync:
            raise InvalidRequestError(
                "KEEP is for a plan with resync", field=f"{AT_CHANGES}.kinds[{i}]"
            )
        before = self._before.pop((group, sequence_id), None)  # once
        if before is None:
            at = f"{AT_CHANGES}.sequence_ids[{i}]"
            raise SequenceNotFoundError(no_table(sequence_id), field=at)
        made = self._prefix(before, num_blocks, i)
        # This way only the dropped entries are counted one by one.
        self._counts.add(before)
        self._counts.add(before.part(num_blocks, len(before.blocks)), -1)
        return made

    def _prefix(self, table: Table, num_blocks: int, i: int) -> Table:
        _check_at_most(len(table.blocks), num_blocks, i)
        if num_blocks == len(table.blocks):
            return table
        made = self._prefixes.get((table, num_blocks))
        if made is None:
            made = self._prefixes[table, num_blocks] = Table(
                table.tier_key,
                table.blocks[:num_blocks],
                table.generations[:num_blocks],
                min(table.num_trimmed, num_blocks),
                table.has_holes,
            )
        return made

    def _shorten(self, old: Table, kind: int, num_blocks: int, i: int) -> Table | None:
        """Return what DROP, TRUNCATE or TRIM leaves of a table; None if nothing is left."""
        length = len(old.blocks)
        if kind == DROP:
            self._counts.add(old, -1)
            return None
        if kind == TRUNCATE:
            made = self._prefix(old, num_blocks, i)
            self._counts.add(old.part(num_blocks, length), -1)
            return made
        _check_at_most(length, num_blocks, i)
        if num_blocks <= old.num_trimmed:
            return old
        self._copy(length, i)
        self._counts.add(old.part(0, num_blocks).copy(), -1)
        blocks, generations = old.blocks.copy(), old.generations.copy()
        blocks[:num_blocks] = generations[:num_blocks] = 0
        return Table(old.tier_key, blocks, generations, num_blocks, old.has_holes)


def _check_at_most(length: int, num_blocks: int, i: int) -> None:
    if num_blocks > length:
        raise InvalidRequestError(
            f"must be at most {length}, the length of the table, is {num_blocks}",
            field=f"{AT_CHANGES}.num_blocks[{i}]",
        )


def _check_own_tables(
    tables: BlockTables, session_id: int, new: NewBlocks, allocated: AllocatedBlocks
) -> None:
    """Raise StaleGenerationError if a table of the plan's session still refers to a former
    generation of a block that the plan allocates. Another session's tables may: the control plane
    has taken the block from it.
    """
    for tier_key, of_tier in allocated.items():
        left = of_tier.blocks[tables.stale_counts[tier_key][of_tier.blocks] > 0]
        if not len(left):
            continue
        is_left = np.zeros(tables.num_blocks[tier_key], np.bool_)
        is_left[left] = True
        for sequence_id, table in tables.of_session(session_id, group_of(tier_key)).items():
            if table.tier_key != tier_key:
                continue
            held = table.held
            stale = is_left[held.blocks] & (
                held.generations != tables.generations[tier_key][held.blocks]
            )
            if stale.any():
                block = held.blocks[stale.argmax()]
                raise StaleGenerationError(
                    f"block {block} is allocated while the table of sequence {sequence_id} refers "
                    "to it: the plan has to remove that entry",
                    field=new.field_of(tier_key, int(block)),
                )
