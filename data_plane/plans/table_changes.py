"""Applies a plan's changes to the block tables, checking every field and every generation.

Entries of all changes are checked and counted as whole columns; the loop over changes only
assembles tables. A plan may allocate a block that its own session still refers to, or allocate one
twice, as long as no table refers to a former generation after all changes.

To be called inside ``BlockTables.transaction``, which undoes what fails half way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.block_tables import BlockTables, Table, no_table
from data_plane.plans.plan_columns import Mask, check_groups, ints, limits_of_tiers, refuse
from kvplane import columns
from kvplane.errors import (
    BlockInUseError,
    InvalidRequestError,
    SequenceNotFoundError,
    StaleGenerationError,
)
from kvplane.v1 import types_pb2 as pb

_MAX_GENERATION = 2**63 - 2
_AT = "plan.changes"
_SET, _REPLACE, _FORK, _DROP = (
    pb.TABLE_CHANGE_KIND_SET,
    pb.TABLE_CHANGE_KIND_REPLACE,
    pb.TABLE_CHANGE_KIND_FORK,
    pb.TABLE_CHANGE_KIND_DROP,
)


@dataclass(frozen=True, slots=True)
class Allocated:
    """The blocks of one tier that a plan allocates. A block allocated twice is listed twice."""

    blocks: NDArray[np.int64]
    generations: NDArray[np.int64]
    former_generations: NDArray[np.int64]
    """The generation of each block before the allocation."""

    def pairs(self) -> set[tuple[int, int]]:
        """(block, generation) of each."""
        return set(zip(self.blocks.tolist(), self.generations.tolist(), strict=True))

    def former_pairs(self) -> set[tuple[int, int]]:
        """(block, former generation) of each."""
        return set(zip(self.blocks.tolist(), self.former_generations.tolist(), strict=True))


AllocatedBlocks = dict["pb.Tier", Allocated]
"""By tier; a tier without any is left out."""


def apply_changes(tables: BlockTables, session_id: int, plan: pb.Plan) -> AllocatedBlocks:
    """Apply ``plan.changes`` in order. Returns the blocks that the plan allocates.

    Raises InvalidRequestError, SequenceNotFoundError, StaleGenerationError and BlockInUseError,
    each naming its field.
    """
    if not plan.changes.ByteSize() and not plan.resync:
        return {}  # as in most decode steps
    changes = _Changes.read(tables, plan.changes)
    allocated = _allocate(tables, changes)
    _check_generations(tables, changes, allocated)
    counts = _Counts()
    if plan.resync:
        for sequence_id, table in list(tables.of_session(session_id).items()):
            tables.put(session_id, sequence_id, None)
            counts.remove(table)
    _change_tables(tables, session_id, changes, counts)
    _check_no_stale_references(tables, session_id, changes, allocated, counts)
    counts.apply(tables)
    return allocated


@dataclass(frozen=True, slots=True)
class _Changes:
    """The columns of ``plan.changes``, checked one by one. C changes set E entries in all."""

    kinds: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    tiers: NDArray[np.int64]
    first_blocks: NDArray[np.int64]
    num_blocks: NDArray[np.int64]
    parents: NDArray[np.int64]
    """[forks]."""
    blocks: NDArray[np.int64]
    """[E]."""
    generations: NDArray[np.int64]
    """[E]."""
    allocated: Mask
    """[E]."""
    entry_tiers: NDArray[np.int64]
    """[E]."""

    @classmethod
    def read(cls, tables: BlockTables, message: pb.TableChanges) -> _Changes:
        kinds = ints(columns.UINT8, message.kinds, f"{_AT}.kinds")
        num = len(kinds)
        refuse(
            (kinds < _SET) | (kinds > _DROP),
            InvalidRequestError,
            lambda i: f"{kinds[i]} is not a TableChangeKind",
            f"{_AT}.kinds",
        )
        sequence_ids = ints(columns.INT64, message.sequence_ids, f"{_AT}.sequence_ids", num)
        refuse(
            sequence_ids < 1,
            InvalidRequestError,
            lambda i: f"must be at least 1, is {sequence_ids[i]}",
            f"{_AT}.sequence_ids",
        )
        check_groups(message.groups, num, f"{_AT}.groups")
        sets = (kinds == _SET) | (kinds == _REPLACE)
        tiers = ints(columns.UINT8, message.tiers, f"{_AT}.tiers", num)
        limits = limits_of_tiers(tables.num_blocks)
        refuse(
            np.where(sets, limits[tiers] < 0, tiers != 0),
            InvalidRequestError,
            lambda i: (
                f"{tiers[i]} is not a tier"
                if sets[i]
                else "must be 0: only SET and REPLACE have a tier"
            ),
            f"{_AT}.tiers",
        )
        first_blocks = ints(columns.INT32, message.first_blocks, f"{_AT}.first_blocks", num)
        refuse(
            np.where(sets, first_blocks < 0, first_blocks != 0),
            InvalidRequestError,
            lambda i: (
                f"must be at least 0, is {first_blocks[i]}"
                if sets[i]
                else "must be 0: only SET and REPLACE set entries"
            ),
            f"{_AT}.first_blocks",
        )
        num_blocks = ints(columns.INT32, message.num_blocks, f"{_AT}.num_blocks", num)
        refuse(
            np.where(kinds == _DROP, num_blocks != 0, num_blocks < 0),
            InvalidRequestError,
            lambda i: (
                "must be 0: DROP has no blocks"
                if kinds[i] == _DROP
                else f"must be at least 0, is {num_blocks[i]}"
            ),
            f"{_AT}.num_blocks",
        )
        num_forks = int(np.count_nonzero(kinds == _FORK))
        parents = ints(
            columns.INT64, message.parent_sequence_ids, f"{_AT}.parent_sequence_ids", num_forks
        )
        entry_tiers = np.repeat(tiers[sets], num_blocks[sets])
        blocks, generations, allocated = _read_entries(message, limits[entry_tiers])
        return cls(
            kinds,
            sequence_ids,
            tiers,
            first_blocks,
            num_blocks,
            parents,
            blocks,
            generations,
            allocated,
            entry_tiers,
        )


def _read_entries(
    message: pb.TableChanges, limits: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Mask]:
    """Blocks, generations and whether they are allocated. ``limits``: for each entry, the number of
    blocks in its tier.
    """
    num = len(limits)
    blocks = ints(columns.INT32, message.indices, f"{_AT}.indices", num)
    refuse(
        (blocks < 0) | (blocks >= limits),
        InvalidRequestError,
        lambda i: f"there is no block {blocks[i]} in this tier, which has {limits[i]} blocks",
        f"{_AT}.indices",
    )
    generations = ints(columns.INT64, message.generations, f"{_AT}.generations", num)
    allocated = ints(columns.UINT8, message.allocated, f"{_AT}.allocated", num)
    refuse(
        allocated > 1,
        InvalidRequestError,
        lambda i: f"must be 0 or 1, is {allocated[i]}",
        f"{_AT}.allocated",
    )
    return blocks, generations, allocated == 1


@dataclass(slots=True)
class _Counts:
    """Table entries that the changes add and remove: pieces of tables, by tier."""

    added: dict[pb.Tier, list[Table]] = field(default_factory=dict)
    removed: dict[pb.Tier, list[Table]] = field(default_factory=dict)

    def add(self, table: Table) -> None:
        self.added.setdefault(table.tier, []).append(table)

    def remove(self, table: Table) -> None:
        self.removed.setdefault(table.tier, []).append(table)

    def apply(self, tables: BlockTables) -> None:
        for pieces, num in ((self.added, 1), (self.removed, -1)):
            for tier, parts in pieces.items():
                tables.add_references(tier, np.concatenate([part.blocks for part in parts]), num)


def _allocate(tables: BlockTables, changes: _Changes) -> AllocatedBlocks:
    """Set the generations of the allocated blocks."""
    allocated: AllocatedBlocks = {}
    if not changes.allocated.any():
        return allocated
    for tier, present in tables.generations.items():
        entries = np.flatnonzero(changes.allocated & (changes.entry_tiers == tier))
        if not len(entries):
            continue
        # By block, and in the order of the changes where a block comes again.
        entries = entries[np.argsort(changes.blocks[entries], kind="stable")]
        blocks, generations = changes.blocks[entries], changes.generations[entries]
        former = present[blocks]
        again = np.flatnonzero(blocks[1:] == blocks[:-1]) + 1
        former[again] = generations[again - 1]
        bad = np.zeros(len(changes.blocks), np.bool_)
        bad[entries] = (generations <= former) | (generations > _MAX_GENERATION)
        _refuse_generations(
            bad,
            changes,
            "a plan that allocates the block has to set a higher one",
            np.where(bad, present[np.where(bad, changes.blocks, 0)], 0),
        )
        allocated[tier] = Allocated(blocks, generations, former)
        tables.allocate(tier, blocks, generations)
    return allocated


def _check_generations(tables: BlockTables, changes: _Changes, allocated: AllocatedBlocks) -> None:
    """Entries that are not allocated must have the present generation, or a former one of a block
    that this plan allocates.
    """
    for tier, present in tables.generations.items():
        others = ~changes.allocated & (changes.entry_tiers == tier)
        if not others.any():
            continue
        now = present[np.where(others, changes.blocks, 0)]
        bad = others & ((changes.generations != now) | (now < 1))
        if bad.any() and tier in allocated:
            ended = allocated[tier].former_pairs()
            for i in np.flatnonzero(bad).tolist():
                pair = int(changes.blocks[i]), int(changes.generations[i])
                bad[i] = pair[1] < 1 or pair not in ended
        _refuse_generations(bad, changes, "it has been allocated again since, or never was", now)


def _refuse_generations(
    bad: Mask, changes: _Changes, reason: str, present: NDArray[np.int64]
) -> None:
    refuse(
        bad,
        StaleGenerationError,
        lambda i: (
            f"block {changes.blocks[i]} has generation {present[i]}, but the plan has "
            f"{changes.generations[i]}: {reason}"
        ),
        f"{_AT}.generations",
    )


def _change_tables(
    tables: BlockTables, session_id: int, changes: _Changes, counts: _Counts
) -> None:
    blocks = changes.blocks.astype(np.int32)
    entry = num_forks = 0
    for i, (kind, sequence_id, tier, first, num) in enumerate(
        zip(
            changes.kinds.tolist(),
            changes.sequence_ids.tolist(),
            changes.tiers.tolist(),
            changes.first_blocks.tolist(),
            changes.num_blocks.tolist(),
            strict=True,
        )
    ):
        table = tables.of_session(session_id).get(sequence_id)
        if kind in (_SET, _REPLACE):
            end = entry + num
            piece = Table(tier, blocks[entry:end], changes.generations[entry:end])
            entry = end
            old = table if kind == _SET else None
            if old is not table:
                counts.remove(table)  # type: ignore[arg-type]
            made = _set_entries(tables, old, piece, first, counts, i)
        elif kind == _FORK:
            made = _fork(tables, session_id, sequence_id, changes, num_forks, num)
            num_forks += 1
            counts.add(made)
            if table is not None:
                counts.remove(table)
        else:
            if table is None:
                raise SequenceNotFoundError(no_table(sequence_id), field=f"{_AT}.sequence_ids[{i}]")
            counts.remove(table)
            tables.put(session_id, sequence_id, None)
            continue
        tables.put(session_id, sequence_id, made)


def _set_entries(
    tables: BlockTables, old: Table | None, piece: Table, first: int, counts: _Counts, i: int
) -> Table:
    """The table with the entries of ``piece`` from ``first`` on. ``i``: the change, for errors."""
    if old is not None and old.tier != piece.tier:
        raise InvalidRequestError(
            "the table is in the other tier: only REPLACE may change it", field=f"{_AT}.tiers[{i}]"
        )
    length = len(old.blocks) if old is not None else 0
    if first > length:
        raise InvalidRequestError(
            f"must be at most {length}, the length of the table, is {first}",
            field=f"{_AT}.first_blocks[{i}]",
        )
    end = first + len(piece.blocks)
    if end > tables.num_blocks[piece.tier]:
        raise InvalidRequestError(
            f"the table would have {end} entries, more than there are blocks in its tier",
            field=f"{_AT}.num_blocks[{i}]",
        )
    counts.add(piece)
    if old is None:
        return Table(piece.tier, piece.blocks.copy(), piece.generations.copy())
    if first < length:
        counts.remove(Table(old.tier, old.blocks[first:end], old.generations[first:end]))
    return Table(
        piece.tier,
        np.concatenate((old.blocks[:first], piece.blocks, old.blocks[end:])),
        np.concatenate((old.generations[:first], piece.generations, old.generations[end:])),
    )


def _fork(
    tables: BlockTables,
    session_id: int,
    sequence_id: int,
    changes: _Changes,
    fork: int,
    num_blocks: int,
) -> Table:
    """A copy of a parent's first entries. ``fork``: the index among the plan's forks."""
    parent_id = int(changes.parents[fork])
    at = f"{_AT}.parent_sequence_ids[{fork}]"
    if parent_id == sequence_id:
        raise InvalidRequestError("a sequence cannot be forked from itself", field=at)
    parent = tables.get(session_id, parent_id, at)
    if num_blocks > len(parent.blocks):
        i = np.flatnonzero(changes.kinds == _FORK)[fork]
        raise InvalidRequestError(
            f"must be at most {len(parent.blocks)}, the length of the parent's table, is "
            f"{num_blocks}",
            field=f"{_AT}.num_blocks[{i}]",
        )
    return Table(
        parent.tier, parent.blocks[:num_blocks].copy(), parent.generations[:num_blocks].copy()
    )


def _check_no_stale_references(
    tables: BlockTables,
    session_id: int,
    changes: _Changes,
    allocated: AllocatedBlocks,
    counts: _Counts,
) -> None:
    """Refuse the plan if a table still refers to a former generation of a block that it allocates.

    All references from before the plan are to former generations, and only this session's can have
    been removed, so those that are left can be counted: before + added - removed.
    """
    for tier, new in allocated.items():
        left = Counter[int]()
        for pieces, sign in ((counts.added, 1), (counts.removed, -1)):
            parts = pieces.get(tier)
            if parts:
                blocks = np.concatenate([part.blocks for part in parts])
                generations = np.concatenate([part.generations for part in parts])
                for block in blocks[generations != tables.generations[tier][blocks]].tolist():
                    left[block] += sign
        before = tables.ref_counts[tier][new.blocks]
        if before.any():
            for block, num in set(zip(new.blocks.tolist(), before.tolist(), strict=True)):
                left[block] += num
        for block, num in left.items():
            if num != 0:
                _refuse_stale_reference(tables, session_id, changes, tier, block)


def _refuse_stale_reference(
    tables: BlockTables, session_id: int, changes: _Changes, tier: pb.Tier, block: int
) -> None:
    entry = np.flatnonzero(
        changes.allocated & (changes.entry_tiers == tier) & (changes.blocks == block)
    )[-1]
    at = f"{_AT}.generations[{entry}]"
    generation = tables.generations[tier][block]
    for sequence_id, table in tables.of_session(session_id).items():
        of_block = table.blocks == block
        if table.tier == tier and (table.generations[of_block] != generation).any():
            raise StaleGenerationError(
                f"block {block} is allocated while the table of sequence {sequence_id} refers to "
                "it: the plan has to remove that entry",
                field=at,
            )
    raise BlockInUseError(
        f"block {block} is allocated while a table of another session refers to it", field=at
    )
