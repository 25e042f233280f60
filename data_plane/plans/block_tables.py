"""The names that the data plane keeps of its own bytes: resident block tables, generations, and
what was published of each block.

    session ── sequence ── Table(tier, blocks, generations)
                                          │
    tier ── block ── generation           names: how many table entries of which session
                  └─ publication          (device tier only; gone when the block is handed out)

Plans change all this inside ``transaction``: what an exception interrupts is as it was before.
Invariant: every table entry has its block's present generation, and ``names`` counts the entries.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    SequenceNotFoundError,
    StaleGenerationError,
)
from kvplane.v1 import control_pb2
from kvplane.v1 import types_pb2 as pb

Block = tuple["pb.Tier", int]
"""(tier, index)."""


@dataclass(slots=True)
class Table:
    """One sequence's blocks, all in one tier. The two arrays run side by side."""

    tier: pb.Tier
    blocks: array[int] = field(default_factory=lambda: array("q"))
    generations: array[int] = field(default_factory=lambda: array("q"))

    def copy(self, num_blocks: int | None = None) -> Table:
        """A table of the first ``num_blocks`` entries, None for all."""
        return Table(self.tier, self.blocks[:num_blocks], self.generations[:num_blocks])


@dataclass(slots=True)
class _Before:
    """What a transaction has touched, as it was. None stands for absent."""

    tables: dict[tuple[int, int], Table | None] = field(default_factory=dict)
    names: dict[Block, dict[int, int] | None] = field(default_factory=dict)
    generations: dict[Block, int] = field(default_factory=dict)
    publications: dict[int, pb.Publication | None] = field(default_factory=dict)


class ResidentTables:
    """All tables of one data plane. Not thread-safe: the executor's lock guards it."""

    def __init__(self, num_blocks: dict[pb.Tier, int], block_size_tokens: int) -> None:
        """``num_blocks``: blocks of each tier (``pb.Tier``)."""
        self.num_blocks = dict(num_blocks)
        self.block_size_tokens = block_size_tokens
        self.publications: dict[int, pb.Publication] = {}
        # Counts publish() calls that marked a block, so that a check of it can be known to be old.
        self.publication_version = 0
        self._generations = {tier: array("q", bytes(8 * n)) for tier, n in num_blocks.items()}
        self._tables: dict[int, dict[int, Table]] = {}
        self._names: dict[Block, dict[int, int]] = {}
        self._before: _Before | None = None

    @property
    def num_sequences(self) -> int:
        """Tables of all sessions."""
        return sum(len(tables) for tables in self._tables.values())

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes made inside are undone when an exception leaves it."""
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

    def sequences(self, session_id: int) -> list[int]:
        """The session's sequences."""
        return list(self._tables.get(session_id, ()))

    def find(self, session_id: int, sequence_id: int) -> Table | None:
        """A table, or None. Callers do not change it."""
        return self._tables.get(session_id, {}).get(sequence_id)

    def get(self, session_id: int, sequence_id: int, field: str) -> Table:
        """A table. Raises SequenceNotFoundError naming ``field``."""
        table = self.find(session_id, sequence_id)
        if table is None:
            raise SequenceNotFoundError(f"sequence {sequence_id} has no table", field=field)
        return table

    def put(self, session_id: int, sequence_id: int, table: Table) -> None:
        """Make or replace a table."""
        self.drop(session_id, sequence_id)
        self._remember_table(session_id, sequence_id)
        self._tables.setdefault(session_id, {})[sequence_id] = table
        self._name(session_id, table.tier, table.blocks)

    def splice(
        self,
        session_id: int,
        sequence_id: int,
        first: int,
        blocks: array[int],
        generations: array[int],
    ) -> None:
        """Set entries [first, first + len(blocks)) of a table that exists."""
        self._remember_table(session_id, sequence_id)
        table = self._tables[session_id][sequence_id]
        end = first + len(blocks)
        self._unname(session_id, table.tier, table.blocks[first:end])
        table.blocks[first:end] = blocks
        table.generations[first:end] = generations
        self._name(session_id, table.tier, blocks)

    def drop(self, session_id: int, sequence_id: int) -> None:
        """Remove a table if there is one."""
        table = self.find(session_id, sequence_id)
        if table is None:
            return
        self._remember_table(session_id, sequence_id)
        self._unname(session_id, table.tier, table.blocks)
        tables = self._tables[session_id]
        del tables[sequence_id]
        if not tables:
            del self._tables[session_id]

    def drop_session(self, session_id: int) -> None:
        """Remove all tables of a session."""
        for sequence_id in self.sequences(session_id):
            self.drop(session_id, sequence_id)

    def drop_all(self) -> None:
        """Remove all tables of all sessions; generations and publications stay."""
        self._tables.clear()
        self._names.clear()

    def generation(self, tier: pb.Tier, index: int) -> int:
        """A block's present generation; 0 before it was first handed out."""
        return self._generations[tier][index]

    def hand_out(self, tier: pb.Tier, index: int, generation: int) -> None:
        """Begin a block's new life: what was published of it is forgotten."""
        if self._before is not None:
            before = self._before
            before.generations.setdefault((tier, index), self._generations[tier][index])
            if tier == pb.TIER_DEVICE:
                before.publications.setdefault(index, self.publications.get(index))
        self._generations[tier][index] = generation
        if tier == pb.TIER_DEVICE:
            self.publications.pop(index, None)

    def naming_sessions(self, tier: pb.Tier, index: int) -> Iterable[int]:
        """The sessions whose tables name a block."""
        return self._names.get((tier, index), ())

    def num_names(self, tier: pb.Tier, index: int) -> int:
        """Table entries that name a block."""
        return sum(self._names.get((tier, index), {}).values())

    def check_present(self, session_id: int, blocks: set[Block]) -> None:
        """Raise StaleGenerationError if a table of the session names an earlier life of one."""
        if not blocks:
            return
        by_tier = {t: {index for tier, index in blocks if tier == t} for t in self.num_blocks}
        for sequence_id, table in self._tables.get(session_id, {}).items():
            moved = by_tier[table.tier]
            if moved.isdisjoint(table.blocks):
                continue
            for index, generation in zip(table.blocks, table.generations, strict=True):
                if index in moved and generation != self._generations[table.tier][index]:
                    raise StaleGenerationError(
                        f"block {index} is handed out while sequence {sequence_id} names it",
                        field="plan.changes",
                    )

    def publish(self, publication: pb.Publication, field: str) -> bool:
        """Keep what a block holds; False when its generation has moved on.

        Raises InvalidRequestError naming the part of ``field`` at fault.
        """
        block = publication.block
        self._check_publication(publication, field)
        if self.generation(pb.TIER_DEVICE, block.index) != block.generation:
            return False
        kept = pb.Publication()
        kept.CopyFrom(publication)
        self.publications[block.index] = kept
        self.publication_version += 1
        return True

    def report(self) -> Iterator[control_pb2.ReportedBlock]:
        """Every block that was ever handed out: its generation and what was published of it."""
        for tier, generations in self._generations.items():
            for index, generation in enumerate(generations):
                if generation == 0:
                    continue
                ref = pb.BlockRef(tier=tier, index=index, generation=generation)
                publication = self.publications.get(index) if tier == pb.TIER_DEVICE else None
                yield control_pb2.ReportedBlock(block=ref, publication=publication)

    def check_integrity(self) -> None:
        """Raise InternalError unless the module's invariant holds."""
        counted: dict[Block, dict[int, int]] = {}
        for session_id, tables in self._tables.items():
            for sequence_id, table in tables.items():
                at = f"session {session_id}, sequence {sequence_id}"
                _require(len(table.blocks) == len(table.generations), f"{at}: ragged table")
                for index, generation in zip(table.blocks, table.generations, strict=True):
                    known = 0 <= index < self.num_blocks[table.tier]
                    _require(known, f"{at}: no block {index}")
                    present = self.generation(table.tier, index)
                    _require(generation == present, f"{at}: block {index} has moved on")
                    sessions = counted.setdefault((table.tier, index), {})
                    sessions[session_id] = sessions.get(session_id, 0) + 1
        _require(counted == self._names, "the counts of names are not those of the tables")
        for index, publication in self.publications.items():
            present = self.generation(pb.TIER_DEVICE, index)
            fits = (publication.block.index, publication.block.generation) == (index, present)
            _require(fits and present > 0, f"block {index}: a publication of another life")
        _require(self._before is None, "a transaction is open")

    def _check_publication(self, publication: pb.Publication, field: str) -> None:
        block = publication.block
        if block.tier != pb.TIER_DEVICE:
            raise InvalidRequestError("must be the device tier", field=f"{field}.block.tier")
        if not 0 <= block.index < self.num_blocks[pb.TIER_DEVICE]:
            raise InvalidRequestError("no such block", field=f"{field}.block.index")
        if block.generation < 1:
            raise InvalidRequestError("must be at least 1", field=f"{field}.block.generation")
        if publication.group != 0:
            raise InvalidRequestError("no such layer group", field=f"{field}.group")
        if len(publication.hash) != 16:
            raise InvalidRequestError("must be 16 bytes", field=f"{field}.hash")
        if len(publication.parent_hash) not in (0, 16):
            raise InvalidRequestError("must be 0 or 16 bytes", field=f"{field}.parent_hash")
        if len(publication.token_ids) != 4 * self.block_size_tokens:
            raise InvalidRequestError("must be one block's tokens", field=f"{field}.token_ids")

    def _name(self, session_id: int, tier: pb.Tier, blocks: array[int]) -> None:
        for index in blocks:
            self._remember_names((tier, index))
            sessions = self._names.setdefault((tier, index), {})
            sessions[session_id] = sessions.get(session_id, 0) + 1

    def _unname(self, session_id: int, tier: pb.Tier, blocks: array[int]) -> None:
        for index in blocks:
            self._remember_names((tier, index))
            sessions = self._names[tier, index]
            sessions[session_id] -= 1
            if sessions[session_id] == 0:
                del sessions[session_id]
            if not sessions:
                del self._names[tier, index]

    def _remember_table(self, session_id: int, sequence_id: int) -> None:
        if self._before is None or (session_id, sequence_id) in self._before.tables:
            return
        table = self.find(session_id, sequence_id)
        self._before.tables[session_id, sequence_id] = table.copy() if table else None

    def _remember_names(self, block: Block) -> None:
        if self._before is None or block in self._before.names:
            return
        sessions = self._names.get(block)
        self._before.names[block] = dict(sessions) if sessions is not None else None

    def _undo(self, before: _Before) -> None:
        for (session_id, sequence_id), table in before.tables.items():
            if table is not None:
                self._tables.setdefault(session_id, {})[sequence_id] = table
                continue
            tables = self._tables.get(session_id, {})
            tables.pop(sequence_id, None)
            if not tables:
                self._tables.pop(session_id, None)
        for block, sessions in before.names.items():
            if sessions is None:
                self._names.pop(block, None)
            else:
                self._names[block] = sessions
        for (tier, index), generation in before.generations.items():
            self._generations[tier][index] = generation
        for index, publication in before.publications.items():
            if publication is None:
                self.publications.pop(index, None)
            else:
                self.publications[index] = publication


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InternalError(message)
