"""The data plane's metadata of its own memory: block tables, generations, reference counts and
publications.

    session ── sequence ── Table(tier, blocks, generations, num_trimmed)
                                          │
    tier ── block ── generation           ref_count, stale_count: table entries that refer to it
                  └─ publication          (device tier only; dropped when the block is allocated)

Plans change all this inside ``transaction``, which undoes the changes when an exception is raised.
``ref_counts`` counts the entries of a block's present generation. An entry is stale when its block
has been allocated again: the control plane has taken the sequence away, and its session's next plan
drops the table. Whoever uses a table checks that it has none (``first_stale``).

A table is never changed in place, so tables may share arrays, and keeping a former one for undo is
free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    """One sequence's blocks, all in one tier. Never changed once it is made; sequences share it."""

    tier: pb.Tier
    blocks: NDArray[np.int32]
    """[num_blocks]."""
    generations: NDArray[np.int64]
    """[num_blocks]."""
    num_trimmed: int = 0
    """Leading entries that were dropped behind the attention window. Their block and generation are
    0: kernels that are given more of a table than they need find the id of a block there.
    """

    def part(self, begin: int, end: int) -> Table:
        """The entries [begin, end) without the trimmed ones."""
        held = slice(max(begin, self.num_trimmed), end)
        return Table(self.tier, self.blocks[held], self.generations[held])

    @property
    def held(self) -> Table:
        """The entries without the trimmed ones."""
        return self.part(0, len(self.blocks)) if self.num_trimmed else self


@dataclass(slots=True)
class _Before:
    """The former values of what a transaction has changed."""

    num_stale: dict[pb.Tier, int]
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
        """[num_blocks] for each tier: table entries of the block's present generation."""
        self.stale_counts = {tier: np.zeros(n, np.int32) for tier, n in num_blocks.items()}
        """[num_blocks] for each tier: table entries of a former generation."""
        self.num_taken = 0
        """Counts the plans that made entries stale, which make earlier checks outdated."""
        self.publications = Publications(num_blocks[pb.TIER_DEVICE], block_size_tokens)
        self._num_stale = dict.fromkeys(num_blocks, 0)
        self._tables: dict[int, dict[int, Table]] = {}
        self._before: _Before | None = None

    @property
    def num_sequences(self) -> int:
        """Tables of all sessions."""
        return sum(map(len, self._tables.values()))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo all changes made inside when an exception is raised there."""
        self._before = _Before(dict(self._num_stale))
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

    def first_stale(self, tables: Sequence[Table]) -> int | None:
        """The first of these tables, all of one tier, that has a stale entry; None if none has."""
        if not tables or not self._num_stale[tier := tables[0].tier]:
            return None
        stale = self.stale_counts[tier]
        if not stale[np.concatenate([table.blocks for table in tables])].any():
            return None
        present = self.generations[tier]
        for i, table in enumerate(tables):
            held = table.held
            if (held.generations != present[held.blocks]).any():
                return i
        return None

    def add_references(self, tier: pb.Tier, tables: Mapping[Table, int]) -> None:
        """Count the entries of tables of one tier, each as often as it says: below 0 for those that
        are counted no more.
        """
        of_weight: dict[int, list[Table]] = {}
        for table, weight in tables.items():
            if weight:
                of_weight.setdefault(weight, []).append(table.held)
        for weight, parts in of_weight.items():
            blocks = np.concatenate([part.blocks for part in parts])
            generations = np.concatenate([part.generations for part in parts])
            is_stale = generations != self.generations[tier][blocks]
            if is_stale.any():
                self._add(self.stale_counts[tier], blocks[is_stale], weight)
                self._num_stale[tier] += weight * int(np.count_nonzero(is_stale))
                blocks = blocks[~is_stale]
            self._add(self.ref_counts[tier], blocks, weight)

    def allocate(self, tier: pb.Tier, blocks: Array, generations: Array) -> None:
        """Set new generations of blocks: entries that refer to them are stale from now on, and
        their publications are dropped. ``blocks``: ascending; where one is listed twice, its last
        generation counts.
        """
        self._set(self.generations[tier], blocks, generations)
        if tier == pb.TIER_DEVICE:
            self._set(self.publications.published, blocks, False)
        num_entries = self.ref_counts[tier][blocks]
        if num_entries.any():
            stale = self.stale_counts[tier]
            self._set(stale, blocks, stale[blocks] + num_entries)
            self._set(self.ref_counts[tier], blocks, 0)
            self._num_stale[tier] += int(num_entries[np.diff(blocks, prepend=-1) > 0].sum())
            self.num_taken += 1

    def drop_session(self, session_id: int) -> None:
        """Remove all tables of a session."""
        tables = Counter(self._tables.pop(session_id, {}).values())
        for tier in self.num_blocks:
            self.add_references(tier, {t: -num for t, num in tables.items() if t.tier == tier})

    def drop_all(self) -> None:
        """Remove all tables of all sessions; generations and publications stay."""
        self._tables.clear()
        for counts in (*self.ref_counts.values(), *self.stale_counts.values()):
            counts[:] = 0
        self._num_stale = dict.fromkeys(self.num_blocks, 0)

    def check_integrity(self) -> None:
        """Raise InternalError unless counts, generations and tables agree."""
        counted = {
            tier: (np.zeros(n, np.int32), np.zeros(n, np.int32))
            for tier, n in self.num_blocks.items()
        }
        for session_id, tables in self._tables.items():
            _require(bool(tables), f"session {session_id}: an empty set of tables")
            for sequence_id, table in tables.items():
                at = f"session {session_id}, sequence {sequence_id}"
                self._check_table(table, at)
                held = table.held
                stale = held.generations != self.generations[table.tier][held.blocks]
                for counts, of_kind in zip(counted[table.tier], (~stale, stale), strict=True):
                    np.add.at(counts, held.blocks[of_kind], np.int32(1))
        for tier, (current, stale) in counted.items():
            same = np.array_equal(current, self.ref_counts[tier])
            _require(same, f"tier {tier}: the reference counts are not those of the tables")
            same = np.array_equal(stale, self.stale_counts[tier])
            same &= int(stale.sum()) == self._num_stale[tier]
            _require(same, f"tier {tier}: the counts of stale entries are not those of the tables")
        published = self.generations[pb.TIER_DEVICE][self.publications.published]
        _require(bool((published > 0).all()), "a published block was never allocated")
        _require(self._before is None, "a transaction is open")

    def _check_table(self, table: Table, at: str) -> None:
        blocks, generations, num_trimmed = table.blocks, table.generations, table.num_trimmed
        _require(len(blocks) == len(generations), f"{at}: columns of unequal length")
        known = (blocks >= 0) & (blocks < self.num_blocks[table.tier])
        _require(bool(known.all()), f"{at}: a block that is not there")
        _require(0 <= num_trimmed <= len(blocks), f"{at}: trimmed by more than it is long")
        hole = (*blocks[:num_trimmed].tolist(), *generations[:num_trimmed].tolist())
        _require(not any(hole), f"{at}: a trimmed entry has a block")
        held = table.held
        present = self.generations[table.tier][held.blocks]
        in_range = (held.generations >= 1) & (held.generations <= present)
        _require(bool(in_range.all()), f"{at}: a generation that is to come")

    def _add(self, array: Array, indices: Array, num: int) -> None:
        self._remember(array, indices)
        np.add.at(array, indices, array.dtype.type(num))  # a Python int would be 40 times slower

    def _set(self, array: Array, indices: Array, values: Any) -> None:
        self._remember(array, indices)
        array[indices] = values

    def _remember(self, array: Array, indices: Array) -> None:
        if self._before is not None:
            self._before.elements.append((array, indices, array[indices]))

    def _undo(self, before: _Before) -> None:
        self._before = None
        self._num_stale = before.num_stale
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


def taken_away(sequence_id: int) -> str:
    """The error message for a sequence whose table has a stale entry."""
    return (
        f"blocks of sequence {sequence_id} have been allocated again: the control plane has taken "
        "the sequence away, or another plan of the session has yet to be started"
    )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InternalError(message)
