"""The data plane's metadata of its own memory: block tables, generations, reference counts and
publications.

    session ── sequence ── Table(tier, blocks, generations)
                                          │
    tier ── block ── generation           ref_count: table entries that refer to the block
                  └─ publication          (device tier only; dropped when the block is allocated)

Plans change all this inside ``transaction``, which undoes the changes when an exception is raised.
Invariant: every table entry has its block's present generation, and ``ref_counts`` counts the
entries. A table's arrays are never changed in place, so keeping a former table for undo is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.publications import Publications
from kvplane.errors import InternalError, SequenceNotFoundError
from kvplane.v1 import types_pb2 as pb

Array: TypeAlias = NDArray[Any]


@dataclass(eq=False, slots=True)
class Table:
    """One sequence's blocks, all in one tier. Never changed once it is made."""

    tier: pb.Tier
    blocks: NDArray[np.int32]
    """[num_blocks]."""
    generations: NDArray[np.int64]
    """[num_blocks]."""


@dataclass(slots=True)
class _Before:
    """The former values of what a transaction has changed."""

    tables: dict[tuple[int, int], Table | None] = field(default_factory=dict)
    elements: list[tuple[Array, Array, Array]] = field(default_factory=list)
    """Array, indices and the values that were there, in the order of the changes."""


class BlockTables:
    """All tables of one data plane. Not thread-safe: the executor's lock guards it."""

    def __init__(self, num_blocks: dict[pb.Tier, int], block_size_tokens: int) -> None:
        """``num_blocks``: blocks of each tier (``pb.Tier``)."""
        self.num_blocks = dict(num_blocks)
        self.block_size_tokens = block_size_tokens
        self.generations = {tier: np.zeros(n, np.int64) for tier, n in num_blocks.items()}
        """[num_blocks] for each tier; 0 before a block was first allocated."""
        self.ref_counts = {tier: np.zeros(n, np.int32) for tier, n in num_blocks.items()}
        """[num_blocks] for each tier."""
        self.publications = Publications(num_blocks[pb.TIER_DEVICE], block_size_tokens)
        self._tables: dict[int, dict[int, Table]] = {}
        self._before: _Before | None = None

    @property
    def num_sequences(self) -> int:
        """Tables of all sessions."""
        return sum(map(len, self._tables.values()))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo all changes made inside when an exception is raised there."""
        self._before = _Before()
        try:
            yield
        except BaseException:
            self._undo(self._before)
            raise
        finally:
            self._before = None

    def session_ids(self) -> list[int]:
        """The sessions that have tables."""
        return list(self._tables)

    def of_session(self, session_id: int) -> Mapping[int, Table]:
        """The session's tables by sequence."""
        return self._tables.get(session_id, {})

    def get(self, session_id: int, sequence_id: int, field: str) -> Table:
        """A table. Raises SequenceNotFoundError naming ``field``."""
        table = self.of_session(session_id).get(sequence_id)
        if table is None:
            raise SequenceNotFoundError(no_table(sequence_id), field=field)
        return table

    def put(self, session_id: int, sequence_id: int, table: Table | None) -> None:
        """Add, replace or, with None, remove a table. The caller updates the reference counts."""
        tables = self._tables.setdefault(session_id, {})
        if self._before is not None:
            self._before.tables.setdefault((session_id, sequence_id), tables.get(sequence_id))
        if table is not None:
            tables[sequence_id] = table
            return
        tables.pop(sequence_id, None)
        if not tables:
            del self._tables[session_id]

    def add_references(self, tier: pb.Tier, blocks: Array, num: int = 1) -> None:
        """Add ``num``, which may be negative, to the reference count of each of ``blocks``."""
        self._remember(self.ref_counts[tier], blocks)
        np.add.at(self.ref_counts[tier], blocks, num)

    def allocate(self, tier: pb.Tier, blocks: Array, generations: Array) -> None:
        """Set new generations of blocks and drop their publications. Where a block is listed twice,
        the last entry counts.
        """
        self._remember(self.generations[tier], blocks)
        self.generations[tier][blocks] = generations
        if tier == pb.TIER_DEVICE:
            self._remember(self.publications.published, blocks)
            self.publications.published[blocks] = False

    def drop_session(self, session_id: int) -> None:
        """Remove all tables of a session."""
        for table in self._tables.pop(session_id, {}).values():
            self.add_references(table.tier, table.blocks, -1)

    def drop_all(self) -> None:
        """Remove all tables of all sessions; generations and publications stay."""
        self._tables.clear()
        for counts in self.ref_counts.values():
            counts[:] = 0

    def check_integrity(self) -> None:
        """Raise InternalError unless the module's invariant holds."""
        counted = {tier: np.zeros(n, np.int32) for tier, n in self.num_blocks.items()}
        for session_id, tables in self._tables.items():
            _require(bool(tables), f"session {session_id}: an empty set of tables")
            for sequence_id, table in tables.items():
                at = f"session {session_id}, sequence {sequence_id}"
                blocks, generations = table.blocks, table.generations
                _require(len(blocks) == len(generations), f"{at}: columns of unequal length")
                known = (blocks >= 0) & (blocks < self.num_blocks[table.tier])
                _require(bool(known.all()), f"{at}: a block that is not there")
                present = self.generations[table.tier][blocks]
                _require(np.array_equal(generations, present), f"{at}: an old generation")
                np.add.at(counted[table.tier], blocks, 1)
        for tier, counts in counted.items():
            same = np.array_equal(counts, self.ref_counts[tier])
            _require(same, f"tier {tier}: the reference counts are not those of the tables")
        published = self.generations[pb.TIER_DEVICE][self.publications.published]
        _require(bool((published > 0).all()), "a published block was never allocated")
        _require(self._before is None, "a transaction is open")

    def _remember(self, array: Array, indices: Array) -> None:
        if self._before is not None:
            self._before.elements.append((array, indices, array[indices]))

    def _undo(self, before: _Before) -> None:
        self._before = None
        for (session_id, sequence_id), table in before.tables.items():
            self.put(session_id, sequence_id, table)
        for array, indices, values in reversed(before.elements):
            array[indices] = values


def no_table(sequence_id: int) -> str:
    """The error message for a sequence without a table."""
    return (
        f"sequence {sequence_id} has no block table here: it was freed, or the plan that admits "
        "it has not been started"
    )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InternalError(message)
