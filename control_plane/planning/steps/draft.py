"""The changes of one step: made to blocks and tables at once, and collected for the step's plan.

Nothing here fails: callers have checked everything that can, and that there is room. Invariant: the
columns agree with the tables.
"""

from __future__ import annotations

from typing import Final

from control_plane.blocks.block_store import BlockStore
from control_plane.planning.pools.shards import TIERS
from control_plane.planning.sequence import Sequence
from control_plane.planning.session import PlanRecord, Session
from control_plane.planning.steps.plan_columns import (
    Ref,
    SpanColumns,
    TableChangeColumns,
    TransferColumns,
)
from kvplane import protocol, signing
from kvplane.v1 import types_pb2 as tpb

_DEVICE: Final = tpb.TIER_DEVICE


class Draft:
    """One step of a session. ``number`` is the step's."""

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.pool = session.pool
        self.number = number
        self.changes = TableChangeColumns()
        self.transfers = TransferColumns()
        self.spans = SpanColumns()
        self.touched: list[Sequence] = []  # have spans or transfers
        self._pins: list[tuple[BlockStore, int]] = []
        # Destinations of this step's transfers. They are not allocated twice in one plan.
        self._destinations: dict[tpb.Tier, set[int]] = {tier: set() for tier in TIERS}
        self._kept: list[tuple[BlockStore, int]] = []
        # What the step allocates; only a plan of whole tables needs it.
        self._allocated: dict[tpb.Tier, set[int]] = {tier: set() for tier in TIERS}

    def computes(self, sequence: Sequence) -> bool:
        """Whether the step computes tokens of the sequence."""
        pending = sequence.pending
        return bool(pending) and pending[-1][0] == self.number

    # Blocks

    def allocate(self, tier: tpb.Tier, num_blocks: int) -> list[int]:
        """Blocks for a table."""
        blocks = self.session.allocate(tier, num_blocks)
        if self.session.resync_due:
            self._allocated[tier].update(blocks)
        return blocks

    def release(self, tier: tpb.Tier, table: list[int]) -> int:
        """Remove a table's references; returns how many blocks no table refers to any more."""
        store, destinations = self.pool.tiers[tier], self._destinations[tier]
        for block in table if destinations else ():
            if block in destinations and store.ref_count[block] == 1:
                # A later operation of this step must not allocate it: two transfers of one plan
                # would write two generations of one block.
                store.pin(block)
                self._kept.append((store, block))
        return self.session.release(tier, table[::-1], self.number)

    def transfer(self, source: tpb.Tier, block: int, destination: tpb.Tier, copy: int) -> None:
        """Copy a block; it is pinned until the plan has run, so that the plan can run again."""
        tiers = self.pool.tiers
        store = tiers[source]
        store.pin(block)
        self._pins.append((store, block))
        self._destinations[destination].add(copy)
        self.transfers.add(
            (source, block, store.generation[block]),
            (destination, copy, tiers[destination].generation[copy]),
        )

    def copy_on_write(self, sequence: Sequence, index: int, first_position: int) -> None:
        """Replace the block at ``index`` by a new one with what is before ``first_position``."""
        old = sequence.table[index]
        new = self.allocate(_DEVICE, 1)[0]
        if index * self.pool.block_size < first_position:
            self.transfer(_DEVICE, old, _DEVICE, new)
            self.pool.counters.num_copies_on_write += 1
        sequence.table[index] = new
        self.set(sequence, index, b"\1")
        self.release(_DEVICE, [old])

    # Columns of the plan

    def set(
        self, sequence: Sequence, first: int, allocated: bytes, *, replace: bool = False
    ) -> None:
        """Set the data plane's ``len(allocated)`` table entries from ``first`` on to the present
        ones; a byte of ``allocated`` is 1 for a block that this step allocates.
        """
        blocks = sequence.table[first : first + len(allocated)]
        generations = self.pool.tiers[sequence.tier].generations(blocks)
        self.changes.set(
            sequence.id, sequence.tier, first, blocks, generations, allocated, replace=replace
        )
        sequence.table_sent = True

    def span(self, sequence: Sequence, num_tokens: int) -> None:
        """The plan computes the next ``num_tokens`` positions of the sequence."""
        if not num_tokens:
            return
        self.spans.sequence_ids.append(sequence.id)
        self.spans.first_positions.append(sequence.num_scheduled)
        self.spans.num_tokens.append(num_tokens)
        self.schedule(sequence, num_tokens)

    def schedule(self, sequence: Sequence, num_tokens: int) -> None:
        """As ``span``, but the caller fills the columns."""
        sequence.num_scheduled += num_tokens
        sequence.pending.append((self.number, sequence.num_scheduled))
        self.touched.append(sequence)

    # The plan

    def finish(self) -> tpb.SignedPayload | None:
        """The plan, which is in flight from now on; None when there is nothing to carry out."""
        for store, block in self._kept:
            store.unpin([block])
        session, pool = self.session, self.pool
        resync = session.resync_due
        if not (resync or self.changes or self.transfers or self.spans):
            return None
        changes, transfers = self._whole_tables() if resync else (self.changes, self.transfers)
        payload = tpb.Plan(
            version=protocol.PAYLOAD_VERSION,
            session=session.ref,
            pool_id=pool.id,
            shard_epochs=pool.epochs,
            number=self.number,
            previous=session.last_plan,
            resync=resync,
            changes=changes.message(),
            transfers=transfers.message(),
            spans=self.spans.message(),
        ).SerializeToString(deterministic=True)
        digest = signing.digest(payload)
        session.plans[self.number] = PlanRecord(
            self.number, digest, self.touched, self.transfers, self._pins
        )
        session.last_plan = self.number
        session.resync_due = False
        return tpb.SignedPayload(
            type=signing.PLAN,
            payload=payload,
            signature=signing.sign_digest(pool.key, signing.PLAN, digest),
        )

    def _whole_tables(self) -> tuple[TableChangeColumns, TransferColumns]:
        """All tables as they are now, and the transfers that fill blocks of theirs.

        A block that a later operation of this step replaced is in no table, so the data plane never
        learns of it: a copy of such a block is made from the block that it was itself copied from.
        """
        changes, transfers = TableChangeColumns(), TransferColumns()
        in_tables: dict[tpb.Tier, set[int]] = {tier: set() for tier in TIERS}
        for sequence in self.session.sequences.values():
            tier, table = sequence.tier, sequence.table
            sequence.table_sent = bool(table)
            if table:
                # Only the first table that refers to a block says that it is allocated.
                new = self._allocated[tier] - in_tables[tier]
                allocated = bytes(block in new for block in table)
                in_tables[tier].update(table)
                generations = self.pool.tiers[tier].generations(table)
                changes.set(sequence.id, tier, 0, table, generations, allocated, replace=True)
        origins: dict[Ref, Ref] = {}
        for source, destination in self.transfers:
            origin = origins[destination] = origins.get(source, source)
            tier, block, generation = destination
            if block in in_tables[tier] and self._generation(tier, block) == generation:
                transfers.add(origin, destination)
        return changes, transfers

    def _generation(self, tier: tpb.Tier, block: int) -> int:
        return self.pool.tiers[tier].generation[block]
