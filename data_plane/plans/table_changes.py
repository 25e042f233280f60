"""Applies a plan's changes to the resident tables, checking every field and every generation.

Run it inside ``ResidentTables.transaction``: what fails half way is undone there.
"""

from __future__ import annotations

from array import array

from data_plane.plans.block_tables import ResidentTables, Table
from kvplane.errors import (
    BlockInUseError,
    InvalidRequestError,
    SequenceNotFoundError,
    StaleGenerationError,
)
from kvplane.v1 import types_pb2 as pb

HandedOut = set[tuple["pb.Tier", int, int]]
"""(tier, index, generation) of blocks that a plan hands out."""

_MAX_GENERATION = 2**63 - 2


def apply_changes(tables: ResidentTables, session_id: int, plan: pb.Plan) -> HandedOut:
    """Apply ``plan.changes`` in order. Returns the blocks that the plan hands out.

    Raises InvalidRequestError, SequenceNotFoundError, StaleGenerationError and BlockInUseError,
    each naming its field.
    """
    return _Changes(tables, session_id).apply(plan)


class _Changes:
    """One plan's changes on their way into the tables."""

    def __init__(self, tables: ResidentTables, session_id: int) -> None:
        self._tables = tables
        self._session_id = session_id
        self._handed_out: HandedOut = set()
        # Blocks handed out while the same session still names them: it may drop the old name later
        # in the plan, and must have done so by the end.
        self._still_named: set[tuple[pb.Tier, int]] = set()

    def apply(self, plan: pb.Plan) -> HandedOut:
        if plan.resync:
            self._tables.drop_session(self._session_id)
        for i, change in enumerate(plan.changes):
            at = f"plan.changes[{i}]"
            if change.sequence_id < 1:
                raise InvalidRequestError("must be above 0", field=f"{at}.sequence_id")
            if change.group != 0:
                raise InvalidRequestError("no such layer group", field=f"{at}.group")
            kind = change.WhichOneof("change")
            if kind == "set":
                self._set_blocks(change.sequence_id, change.set, f"{at}.set")
            elif kind == "fork":
                self._fork(change.sequence_id, change.fork, f"{at}.fork")
            elif kind == "drop":
                self._tables.get(self._session_id, change.sequence_id, f"{at}.sequence_id")
                self._tables.drop(self._session_id, change.sequence_id)
            else:
                raise InvalidRequestError("must be set", field=f"{at}.change")
        self._tables.check_present(self._session_id, self._still_named)
        return self._handed_out

    def _set_blocks(self, sequence_id: int, change: pb.SetBlocks, at: str) -> None:
        tables, session_id = self._tables, self._session_id
        blocks = change.blocks
        num_blocks_of_tier = check_tier(tables, blocks.tier, f"{at}.blocks.tier")
        num_blocks = len(blocks.indices)
        if len(blocks.generations) != num_blocks:
            raise InvalidRequestError("one a block", field=f"{at}.blocks.generations")
        if len(change.fresh) != num_blocks:
            raise InvalidRequestError("one a block", field=f"{at}.fresh")
        table = tables.find(session_id, sequence_id)
        if table is None or change.replace:
            tables.put(session_id, sequence_id, table := Table(blocks.tier))
        elif table.tier != blocks.tier:
            raise InvalidRequestError(
                "differs from the table's, which is not replaced", field=f"{at}.blocks.tier"
            )
        if not 0 <= change.first_block <= len(table.blocks):
            raise InvalidRequestError("is past the table's end", field=f"{at}.first_block")
        if change.first_block + num_blocks > num_blocks_of_tier:
            raise InvalidRequestError("more than the pool has", field=f"{at}.blocks.indices")
        for j in range(num_blocks):
            where = f"{at}.blocks"
            index, generation = blocks.indices[j], blocks.generations[j]
            if not 0 <= index < num_blocks_of_tier:
                raise InvalidRequestError("no such block", field=f"{where}.indices[{j}]")
            if change.fresh[j]:
                self._hand_out(blocks.tier, index, generation, f"{where}.generations[{j}]")
            else:
                check_generation(
                    tables, blocks.tier, index, generation, f"{where}.generations[{j}]"
                )
        tables.splice(
            session_id,
            sequence_id,
            change.first_block,
            array("q", blocks.indices),
            array("q", blocks.generations),
        )

    def _hand_out(self, tier: pb.Tier, index: int, generation: int, field: str) -> None:
        present = self._tables.generation(tier, index)
        if not present < generation <= _MAX_GENERATION:
            raise StaleGenerationError(
                f"a block handed out must be of a generation above {present}", field=field
            )
        for session_id in self._tables.naming_sessions(tier, index):
            if session_id != self._session_id:
                raise BlockInUseError(f"another session names block {index}", field=field)
            self._still_named.add((tier, index))
        self._tables.hand_out(tier, index, generation)
        self._handed_out.add((tier, index, generation))

    def _fork(self, sequence_id: int, change: pb.ForkTable, at: str) -> None:
        if change.parent_sequence_id == sequence_id:
            raise InvalidRequestError("is the sequence itself", field=f"{at}.parent_sequence_id")
        parent = self._tables.find(self._session_id, change.parent_sequence_id)
        if parent is None:
            raise SequenceNotFoundError("has no table", field=f"{at}.parent_sequence_id")
        if not 0 <= change.num_blocks <= len(parent.blocks):
            raise InvalidRequestError("more than the parent has", field=f"{at}.num_blocks")
        self._tables.put(self._session_id, sequence_id, parent.copy(change.num_blocks))


def check_tier(tables: ResidentTables, tier: pb.Tier, field: str) -> int:
    """The number of blocks of ``tier``. Raises InvalidRequestError for an unknown one."""
    if tier not in tables.num_blocks:
        raise InvalidRequestError(f"{tier} is no tier", field=field)
    return tables.num_blocks[tier]


def check_generation(
    tables: ResidentTables, tier: pb.Tier, index: int, generation: int, field: str
) -> None:
    """Raise StaleGenerationError unless ``generation`` is the block's present one."""
    present = tables.generation(tier, index)
    if generation != present or generation < 1:
        raise StaleGenerationError(f"block {index} is of generation {present}", field=field)
