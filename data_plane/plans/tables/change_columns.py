"""Reads the columns of a plan's table changes and of the blocks that it allocates, and checks them
one by one. The checks do not depend on the tables' contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.plan_columns import (
    Mask,
    ints,
    limits_of_tiers,
    read_groups,
    refuse,
    tier_keys,
)
from data_plane.tier_keys import TierKey
from kvplane.errors import InvalidRequestError
from kvplane.wire import columns
from kvplane.wire.plane.v1 import plan_pb2

AT_CHANGES = "plan.changes"
AT_ALLOCATIONS = "plan.allocations"
MAX_ENTRIES = 2**22  # of a table, trimmed entries included
# Of all tables that a plan replaces, or of all that it trims: no message carries these entries.
MAX_TRIMMED_ENTRIES = 2**26
SET, REPLACE, FORK, DROP, TRUNCATE, TRIM, KEEP = (
    plan_pb2.TABLE_CHANGE_KIND_SET,
    plan_pb2.TABLE_CHANGE_KIND_REPLACE,
    plan_pb2.TABLE_CHANGE_KIND_FORK,
    plan_pb2.TABLE_CHANGE_KIND_DROP,
    plan_pb2.TABLE_CHANGE_KIND_TRUNCATE,
    plan_pb2.TABLE_CHANGE_KIND_TRIM,
    plan_pb2.TABLE_CHANGE_KIND_KEEP,
)


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """Columns of blocks and their generations, one element for each block."""

    tier_keys: NDArray[np.int64]
    blocks: NDArray[np.int64]
    generations: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.blocks)


_NONE = BlockColumns(*(np.zeros(0, np.int64) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class ChangeColumns:
    """The columns of ``plan.changes``: C changes, which set E table entries in all."""

    kinds: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    groups: NDArray[np.int64]
    tier_keys: NDArray[np.int64]
    """[C]: the tier of the entries that each change sets; 0 for a change that sets none."""
    first_blocks: NDArray[np.int64]
    num_blocks: NDArray[np.int64]
    parents: NDArray[np.int64]
    """[number of forks]: the parent's sequence id of each fork."""
    entries: BlockColumns
    """[E]: the blocks of the entries that are set."""
    allocated: Mask
    """[E]: whether each entry's block is allocated by the plan."""
    is_hole: Mask | None
    """[E]: whether an entry has no block, as in tables of states. Its block is 0 then. None where
    there are no states.
    """

    @classmethod
    def read(
        cls,
        num_blocks: Mapping[TierKey, int],
        message: plan_pb2.TableChanges,
        state_group: int | None = None,
    ) -> ChangeColumns:
        """Parse and check the columns, for ``BlockTables`` of these. Raises InvalidRequestError."""

        def column(kind: str, name: str, length: int | None = None) -> NDArray[np.int64]:
            return ints(kind, getattr(message, name), f"{AT_CHANGES}.{name}", length)

        def require(bad: Mask, name: str, wanted: Callable[[int], str]) -> None:
            refuse(bad, InvalidRequestError, wanted, f"{AT_CHANGES}.{name}")

        kinds = column(columns.UINT8, "kinds")
        num = len(kinds)
        require(
            (kinds < SET) | (kinds > KEEP),
            "kinds",
            lambda i: f"{kinds[i]} is not a TableChangeKind",
        )
        ids = column(columns.INT64, "sequence_ids", num)
        require(ids < 1, "sequence_ids", lambda i: f"must be at least 1, is {ids[i]}")
        groups = read_groups(message.groups, num, num_blocks, f"{AT_CHANGES}.groups")
        sets = kinds <= REPLACE
        tiers = column(columns.UINT8, "tiers", num)
        limits, in_tiers = limits_of_tiers(num_blocks), tier_keys(tiers, groups)
        require(
            np.where(sets, limits[in_tiers] < 0, tiers != 0),
            "tiers",
            lambda i: (
                f"{tiers[i]} is not a tier"
                if sets[i]
                else "must be 0: only SET and REPLACE have a tier"
            ),
        )
        firsts = column(columns.INT32, "first_blocks", num)
        require(
            np.where(sets, firsts < 0, firsts != 0),
            "first_blocks",
            lambda i: (
                f"must be at least 0, is {firsts[i]}"
                if sets[i]
                else "must be 0: only SET and REPLACE set entries"
            ),
        )
        counts = column(columns.INT32, "num_blocks", num)
        require(
            np.where(kinds == DROP, counts != 0, counts < 0),
            "num_blocks",
            lambda i: (
                "must be 0: DROP has no blocks"
                if kinds[i] == DROP
                else f"must be at least 0, is {counts[i]}"
            ),
        )
        # Checked before arrays of that length are allocated: a few bytes may claim billions.
        column(columns.INT32, "indices", int(counts[sets].sum()))
        num_trimmed = int(np.minimum(firsts[kinds == REPLACE], MAX_ENTRIES).sum())
        if num_trimmed > MAX_TRIMMED_ENTRIES:
            raise InvalidRequestError(
                f"the tables that the plan replaces have {num_trimmed} trimmed entries in all, and "
                f"may have {MAX_TRIMMED_ENTRIES}",
                field=f"{AT_CHANGES}.first_blocks",
            )
        parents = column(columns.INT64, "parent_sequence_ids", int(np.count_nonzero(kinds == FORK)))
        of_states = None if state_group is None else groups[sets] == state_group
        of_sets = in_tiers[sets], counts[sets], of_states
        entries, is_new, is_hole = _read_entries(message, limits, *of_sets)
        return cls(kinds, ids, groups, in_tiers, firsts, counts, parents, entries, is_new, is_hole)


def _read_entries(
    message: plan_pb2.TableChanges,
    limits_of: NDArray[np.int64],
    in_tiers: NDArray[np.int64],
    counts: NDArray[np.int64],
    of_states: Mask | None,
) -> tuple[BlockColumns, Mask, Mask | None]:
    """Parse and check the entries that are set, as ``_read_blocks`` does. For each change that sets
    some: ``in_tiers``, their tier; ``counts``, how many; ``of_states``, whether some may have no
    block. Returns the blocks, which of these the plan allocates, and which entries have none.
    """
    may_lack = None if of_states is None else np.repeat(of_states, counts)
    of_entries = np.repeat(in_tiers, counts)
    entries, is_hole = _read_blocks(message, of_entries, limits_of, AT_CHANGES, may_lack)
    allocated = ints(columns.UINT8, message.allocated, f"{AT_CHANGES}.allocated", len(entries))
    refuse(
        allocated > 1,
        InvalidRequestError,
        lambda i: f"must be 0 or 1, is {allocated[i]}",
        f"{AT_CHANGES}.allocated",
    )
    if is_hole is not None:
        for column, name in ((allocated, "allocated"), (entries.generations, "generations")):
            bad = is_hole & (column != 0)
            refuse(bad, InvalidRequestError, _not_of_a_hole, f"{AT_CHANGES}.{name}")
    return entries, allocated == 1, is_hole


def _not_of_a_hole(_: int) -> str:
    return "must be 0 where there is no block"


def read_allocations(
    num_blocks: Mapping[TierKey, int], message: plan_pb2.Allocations
) -> BlockColumns:
    """Parse the blocks that a plan allocates for no table. ``num_blocks``: of each tier. Raises
    InvalidRequestError.
    """
    if not message.ByteSize():
        return _NONE
    tiers = ints(columns.UINT8, message.tiers, f"{AT_ALLOCATIONS}.tiers")
    groups = read_groups(message.groups, len(tiers), num_blocks, f"{AT_ALLOCATIONS}.groups")
    limits, in_tiers = limits_of_tiers(num_blocks), tier_keys(tiers, groups)
    refuse(
        limits[in_tiers] < 0,
        InvalidRequestError,
        lambda i: f"{tiers[i]} is not a tier",
        f"{AT_ALLOCATIONS}.tiers",
    )
    return _read_blocks(message, in_tiers, limits, AT_ALLOCATIONS)[0]


def _read_blocks(
    message: plan_pb2.TableChanges | plan_pb2.Allocations,
    in_tiers: NDArray[np.int64],
    limits_of: NDArray[np.int64],
    at: str,
    may_lack: Mask | None = None,
) -> tuple[BlockColumns, Mask | None]:
    """Parse and check columns of blocks. ``in_tiers``: each block's tier key. ``limits_of``: from
    ``limits_of_tiers``. ``may_lack``: the entries that may have no block, -1. Also returns which
    have none; their block is 0.
    """
    limits = limits_of[in_tiers]
    blocks = ints(columns.INT32, message.indices, f"{at}.indices", len(in_tiers))
    is_hole = None if may_lack is None else may_lack & (blocks == -1)
    if is_hole is not None:
        blocks = np.where(is_hole, 0, blocks)
    refuse(
        (blocks < 0) | (blocks >= limits),
        InvalidRequestError,
        lambda i: f"there is no block {blocks[i]} in this tier, which has {limits[i]} blocks",
        f"{at}.indices",
    )
    generations = ints(columns.INT64, message.generations, f"{at}.generations", len(in_tiers))
    return BlockColumns(in_tiers, blocks, generations), is_hole
