"""From a step's operations to one plan: table changes, transfers, rows.

Check, count, then change: everything of an operation that can fail is checked, and the blocks it
needs are counted, before its first change. So an operation that fails has changed nothing.

    operation ──checks──► counts blocks ──room?──► blocks change ──► changes, transfers, rows
                  │                        │
                  └─ FAILED (typed error)  └─ LATER, NEVER (shortage)
"""

from __future__ import annotations

from typing import Final

from control_plane.blocks.block_store import BlockStore
from control_plane.planning import checks
from control_plane.planning.model import (
    Admit,
    AdmitResult,
    Append,
    AppendResult,
    BlockRef,
    Done,
    DropTable,
    Fork,
    ForkResult,
    ForkTable,
    Free,
    FreeResult,
    Operation,
    OperationResult,
    Plan,
    Row,
    SetBlocks,
    Shortage,
    Status,
    SwapIn,
    SwapInResult,
    SwapOut,
    SwapOutResult,
    TableChange,
    Tier,
    Transfer,
)
from control_plane.planning.publish import expect_publication, publish, root_of
from control_plane.planning.sequence import Sequence
from control_plane.planning.session import PlanRecord, Session
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    QuotaExceededError,
    SequenceBusyError,
    SequenceExistsError,
    SequenceSwappedError,
)

_KINDS: Final[dict[type[Operation], str]] = {
    Admit: "admit",
    Append: "append",
    Fork: "fork",
    Free: "free",
    SwapOut: "swap_out",
    SwapIn: "swap_in",
}
# Looked up once: a member of an enum costs more to get than to use.
_OK: Final = Status.OK
_DEVICE: Final = Tier.DEVICE
_OTHER: Final = {Tier.DEVICE: Tier.HOST, Tier.HOST: Tier.DEVICE}


class NoRoom(Exception):
    """An operation is LATER or NEVER."""

    def __init__(self, status: Status, shortage: Shortage) -> None:
        super().__init__(status)
        self.result = OperationResult(status, shortage=shortage)


class Planner:
    """Runs the operations of one step and collects its plan."""

    def __init__(
        self, session: Session, number: int, *, incarnation: int, max_sequences: int
    ) -> None:
        self._session = session
        self._incarnation = incarnation
        self._pool = session.pool
        self._device = session.pool.device
        self._block_size = session.pool.block_size
        self._number = number
        self._max_sequences = max_sequences
        self._changes: list[TableChange] = []
        self._transfers: list[Transfer] = []
        self._rows: dict[int, Row] = {}
        self._touched: list[Sequence] = []
        self._pins: list[tuple[BlockStore, int]] = []
        # Destinations of this step's transfers. They are not allocated twice in one plan.
        self._destinations: set[tuple[Tier, int]] = set()
        self._kept: list[tuple[BlockStore, int]] = []
        # Allocated by this step.
        self._fresh: dict[Tier, set[int]] = {tier: set() for tier in Tier}

    def run(self, index: int, operation: Operation) -> OperationResult:
        """Do one operation, or nothing. ``index`` is its place in the step, for messages."""
        try:
            return OperationResult(_OK, self._dispatch(operation))
        except NoRoom as no_room:
            return no_room.result
        except KvplaneError as error:
            # Operations name fields of their own; where they stand is said only when it matters.
            field = f"operations[{index}].{_KINDS[type(operation)]}.{error.field}"
            return OperationResult(
                Status.FAILED,
                error=type(error)(error.message, field=field, retry_delay_s=error.retry_delay_s),
            )

    def finish(self) -> tuple[Plan, PlanRecord] | None:
        """The plan and what to remember of it, or None when there is nothing to carry out."""
        for tier, block in self._kept:
            tier.unpin([block])
        session = self._session
        resync = session.resync_due
        changes, transfers = self._changes, self._transfers
        if resync:
            changes, transfers = self._whole_tables()
        elif not (changes or transfers or self._rows):
            return None
        plan = Plan(
            pool_id=self._pool.id,
            shard_epochs=self._pool.epochs,
            incarnation=self._incarnation,
            session_id=session.id,
            number=self._number,
            previous=session.last_plan,
            resync=resync,
            changes=tuple(changes),
            transfers=tuple(transfers),
            rows=tuple(self._rows.values()),
        )
        record = PlanRecord(self._number, b"", self._touched, self._transfers, self._pins)
        return plan, record

    # Operations

    def _dispatch(self, operation: Operation) -> Done:
        match operation:
            case Append():
                return self._append(operation)
            case Admit():
                return self._admit(operation)
            case Fork():
                return self._fork(operation)
            case Free():
                return self._free(operation)
            case SwapOut():
                return self._swap_out(operation)
            case SwapIn():
                return self._swap_in(operation)

    def _admit(self, operation: Admit) -> AdmitResult:
        session, pool = self._session, self._pool
        self._check_new_sequence(operation.sequence_id, "sequence_id")
        checks.token_ids(operation.token_ids, at_least=1, field="token_ids")
        checks.count(operation.max_total_tokens, field="max_total_tokens")
        checks.count(operation.num_compute_tokens or 0, field="num_compute_tokens")
        num_tokens = len(operation.token_ids) // 4
        num_blocks = checks.div_ceil(num_tokens, pool.block_size)
        need = max(num_blocks, checks.div_ceil(operation.max_total_tokens, pool.block_size))
        self._require_fits(need)
        hits: list[int] = []
        if not operation.skip_prefix_lookup:
            hits = pool.device.index.match(root_of(session.tenant), operation.token_ids)
        hits, copies_last = self._require_room_to_admit(need, num_blocks, num_tokens, hits)

        num_cached = min(len(hits) * pool.block_size, num_tokens - 1)
        sequence = Sequence(operation.sequence_id, operation.token_ids, need)
        sequence.num_cached = sequence.num_written = sequence.num_scheduled = num_cached
        sequence.num_published = len(hits)
        if hits:
            sequence.chain = (hits[-1], pool.device.generation[hits[-1]])
        shared = hits[:-1] if copies_last else hits
        session.add(sequence)
        session.share(Tier.DEVICE, hits)
        fresh = self._allocate(Tier.DEVICE, num_blocks - len(shared))
        sequence.table = shared + fresh
        if copies_last:
            # The whole prompt is cached. Its last token is computed again, and what it writes is
            # never a published block.
            self._transfer(Tier.DEVICE, hits[-1], Tier.DEVICE, fresh[0])
            pool.counters.num_copies_on_write += 1
            self._release(Tier.DEVICE, [hits[-1]])
        self._set(sequence, 0, (False,) * len(shared) + (True,) * len(fresh))
        num_compute = num_tokens - num_cached
        if operation.num_compute_tokens is not None:
            num_compute = min(num_compute, operation.num_compute_tokens)
        self._row(sequence, num_compute)
        if not operation.skip_prefix_lookup:
            pool.counters.num_lookup_tokens += num_tokens
            pool.counters.num_hit_tokens += num_cached
        return AdmitResult(num_cached, num_blocks, num_compute)

    def _append(self, operation: Append) -> AppendResult:
        num_slots, token_ids = operation.num_slots, operation.token_ids
        sequence = self._session.sequence(operation.sequence_id, field="sequence_id")
        if token_ids:
            checks.token_ids(token_ids, field="token_ids")
        checks.count(num_slots, field="num_slots")
        if sequence.tier is not _DEVICE:
            raise SequenceSwappedError(
                f"sequence {sequence.id} is on the host tier", field="sequence_id"
            )
        if num_slots and sequence.id in self._rows:
            raise InvalidRequestError(
                f"sequence {sequence.id} computes in this step already", field="num_slots"
            )
        table, block_size = sequence.table, self._block_size
        first = sequence.num_scheduled
        end = first + num_slots
        num_known = sequence.num_tokens + len(token_ids) // 4
        self._require_fits(checks.div_ceil(end if end > num_known else num_known, block_size))
        end_block = checks.div_ceil(end, block_size)
        num_grown = end_block - len(table)
        unwritable: list[int] = []
        if num_slots:
            is_writable = self._device.is_writable
            for i in range(first // block_size, end_block if num_grown <= 0 else len(table)):
                if not is_writable(table[i]):
                    unwritable.append(i)
        if unwritable or num_grown > 0:
            self._require_room(Tier.DEVICE, len(unwritable) + max(0, num_grown))

        sequence.tokens += token_ids
        for i in unwritable:
            self._copy_on_write(sequence, i, first)
        if num_grown > 0:
            table += self._allocate(Tier.DEVICE, num_grown)
            self._set(sequence, len(table) - num_grown, (True,) * num_grown)
        self._row(sequence, num_slots)
        return AppendResult(first, len(table))

    def _fork(self, operation: Fork) -> ForkResult:
        session = self._session
        parent = session.sequence(operation.parent_sequence_id, field="parent_sequence_id")
        self._check_new_sequence(operation.sequence_id, "sequence_id")
        self._check_idle(parent, "parent_sequence_id")
        child = parent.fork(operation.sequence_id)
        session.share(child.tier, child.table)
        session.add(child)
        if child.resident:
            self._changes.append(ForkTable(child.id, parent.id, len(child.table)))
        # Receipts of what the parent waits for are the child's too.
        self._touched.append(child)
        for record in session.plans.values():
            record.touched.append(child)
        return ForkResult(len(child.table))

    def _free(self, operation: Free) -> FreeResult:
        sequence = self._session.sequence(operation.sequence_id, field="sequence_id")
        self._check_idle(sequence, "sequence_id")
        # Tokens may have become known since the last receipt.
        self._pool.announce(self._session.tenant, publish(self._session, sequence))
        num_released = self._release(sequence.tier, sequence.table)
        if not expect_publication(self._session, sequence):
            sequence.table = []
        self._session.remove(sequence)
        if sequence.resident:
            self._changes.append(DropTable(sequence.id))
        return FreeResult(num_released)

    def _swap_out(self, operation: SwapOut) -> SwapOutResult:
        num_blocks = self._swap(operation.sequence_ids, Tier.DEVICE)
        self._pool.counters.num_swapped_out_blocks += num_blocks
        return SwapOutResult(num_blocks)

    def _swap_in(self, operation: SwapIn) -> SwapInResult:
        num_blocks = self._swap(operation.sequence_ids, Tier.HOST)
        self._pool.counters.num_swapped_in_blocks += num_blocks
        return SwapInResult(num_blocks)

    def _swap(self, sequence_ids: tuple[int, ...], source: Tier) -> int:
        """Move sequences out of ``source``; returns how many blocks are copied."""
        session = self._session
        if not sequence_ids or len(set(sequence_ids)) != len(sequence_ids):
            raise InvalidRequestError("must be at least one, and distinct", field="sequence_ids")
        sequences = []
        for i, sequence_id in enumerate(sequence_ids):
            sequence = session.sequence(sequence_id, field=f"sequence_ids[{i}]")
            self._check_idle(sequence, f"sequence_ids[{i}]")
            if sequence.tier is not source:
                raise SequenceSwappedError(
                    f"sequence {sequence_id} is on the {sequence.tier.value} tier",
                    field=f"sequence_ids[{i}]",
                )
            sequences.append(sequence)
        blocks = list(dict.fromkeys(block for sequence in sequences for block in sequence.table))
        destination = _OTHER[source]
        self._require_fits(len(blocks), destination)
        self._require_room(destination, len(blocks))
        self._move(sequences, blocks, source, destination)
        return len(blocks)

    def _move(
        self, sequences: list[Sequence], blocks: list[int], source: Tier, destination: Tier
    ) -> None:
        """Copy ``blocks`` to the other tier, and let the sequences' tables refer to the copies."""
        session = self._session
        copies = dict(zip(blocks, self._allocate(destination, len(blocks)), strict=True))
        for block, copy in copies.items():
            self._transfer(source, block, destination, copy)
        used: set[int] = set()
        for sequence in sequences:
            table = [copies[block] for block in sequence.table]
            session.share(destination, [copy for copy in table if copy in used])
            fresh = tuple(copy not in used for copy in table)
            used.update(table)
            self._release(source, sequence.table)
            sequence.table, sequence.tier = table, destination
            sequence.moved_by = self._number
            sequence.unpublish()
            self._touched.append(sequence)
            if table:
                self._set(sequence, 0, fresh, replace=True)

    # Checks, before the first change

    def _check_new_sequence(self, sequence_id: int, field: str) -> None:
        checks.identifier(sequence_id, field=field)
        if sequence_id in self._session.sequences:
            raise SequenceExistsError(f"sequence {sequence_id} is live", field=field)
        if len(self._session.sequences) >= self._max_sequences:
            raise QuotaExceededError(f"{self._max_sequences} sequences are live", field=field)

    def _check_idle(self, sequence: Sequence, field: str) -> None:
        if sequence.id in self._rows:
            raise SequenceBusyError(f"sequence {sequence.id} computes in this step", field=field)

    def _require_fits(self, num_blocks: int, tier: Tier = _DEVICE) -> None:
        """NEVER when the tier is smaller than that."""
        if num_blocks > self._pool.tiers[tier].num_blocks:
            raise self._no_room(Status.NEVER, tier, num_blocks)

    def _require_room(self, tier: Tier, num_blocks: int) -> None:
        """LATER when the session can not have so many blocks now."""
        if num_blocks > self._pool.num_available(self._session.id, tier):
            raise self._no_room(Status.LATER, tier, num_blocks)

    def _require_room_to_admit(
        self, need: int, num_blocks: int, num_tokens: int, hits: list[int]
    ) -> tuple[list[int], bool]:
        """LATER when there is no room. Else the hits to use, and whether the last is copied.

        When all tokens are cached, the last one is still computed, into a copy of its block. Where
        there is no room for original and copy, that block is computed anew instead.
        """
        session, pool = self._session, self._pool
        num_guaranteed = pool.reservations.num_guaranteed_with(session.id, need)
        if num_guaranteed > pool.device.num_blocks:
            raise self._no_room(Status.LATER, Tier.DEVICE, need)
        num_available = pool.num_available(session.id, Tier.DEVICE) - pool.num_watermark_blocks()
        copies_last = len(hits) * pool.block_size == num_tokens
        while True:
            num_needed = num_blocks - len(hits) + copies_last
            num_needed += pool.device.num_obtainable_of(hits, session.id)
            if num_needed <= num_available:
                return hits, copies_last
            if not copies_last:
                raise self._no_room(
                    Status.LATER, Tier.DEVICE, num_needed, pool.num_watermark_blocks()
                )
            hits, copies_last = hits[:-1], False

    def _no_room(
        self, status: Status, tier: Tier, num_needed: int, num_left_free: int = 0
    ) -> NoRoom:
        num_available = self._pool.num_available(self._session.id, tier) - num_left_free
        num_pending = self._pool.tiers[tier].num_pending(self._session.id)
        return NoRoom(status, Shortage(tier, num_needed, max(0, num_available), num_pending))

    # Changes, none of which fails

    def _allocate(self, tier: Tier, num_blocks: int) -> list[int]:
        blocks = self._session.allocate(tier, num_blocks)
        self._fresh[tier].update(blocks)
        return blocks

    def _release(self, tier: Tier, table: list[int]) -> int:
        """A table less refers to these; returns how many blocks no table refers to now."""
        store = self._pool.tiers[tier]
        for block in table if self._destinations else ():
            if (tier, block) in self._destinations and store.ref_count[block] == 1:
                # A later operation of this step must not allocate it: two transfers of one plan
                # would write two generations of one block.
                store.pin(block)
                self._kept.append((store, block))
        return self._session.release(tier, table[::-1], self._number)

    def _copy_on_write(self, sequence: Sequence, index: int, first_position: int) -> None:
        """Put a block of its own at ``index``, with what stands before ``first_position``."""
        old = sequence.table[index]
        new = self._allocate(Tier.DEVICE, 1)[0]
        if index * self._pool.block_size < first_position:
            self._transfer(Tier.DEVICE, old, Tier.DEVICE, new)
            self._pool.counters.num_copies_on_write += 1
        sequence.table[index] = new
        self._set(sequence, index, (True,))
        self._release(Tier.DEVICE, [old])

    def _transfer(self, source: Tier, block: int, destination: Tier, copy: int) -> None:
        """Copy a block; it is pinned until the plan has run, so that the plan can run again."""
        source_tier = self._pool.tiers[source]
        source_tier.pin(block)
        self._pins.append((source_tier, block))
        self._destinations.add((destination, copy))
        self._transfers.append(
            Transfer(self._pool.ref(source, block), self._pool.ref(destination, copy))
        )

    def _set(
        self, sequence: Sequence, first: int, fresh: tuple[bool, ...], *, replace: bool = False
    ) -> None:
        """Tell the data plane of the table entries from ``first`` on, as many as ``fresh`` has."""
        blocks = self._pool.refs(sequence.tier, sequence.table[first : first + len(fresh)])
        self._changes.append(SetBlocks(sequence.id, first, blocks, fresh, replace))
        sequence.resident = True

    def _row(self, sequence: Sequence, num_tokens: int) -> None:
        """The plan computes the next ``num_tokens`` positions of the sequence."""
        if not num_tokens:
            return
        first = sequence.num_scheduled
        sequence.num_scheduled += num_tokens
        sequence.pending.append((self._number, sequence.num_scheduled))
        self._rows[sequence.id] = Row(sequence.id, first, num_tokens)
        self._touched.append(sequence)

    # The plan of whole tables

    def _whole_tables(self) -> tuple[list[TableChange], list[Transfer]]:
        """All tables as they are now, and the transfers that fill blocks of theirs.

        A block that a later operation of this step moved on from is in no table, so the data plane
        never learns of it: what was copied from there is read from where it came.
        """
        session = self._session
        changes: list[TableChange] = []
        named: set[BlockRef] = set()
        for sequence in session.sequences.values():
            refs = self._pool.refs(sequence.tier, list(sequence.table))
            fresh = tuple(ref.index in self._fresh[ref.tier] and ref not in named for ref in refs)
            named.update(refs)
            sequence.resident = bool(refs)
            if refs:
                changes.append(SetBlocks(sequence.id, 0, refs, fresh, replace=True))
        transfers: list[Transfer] = []
        origins: dict[BlockRef, BlockRef] = {}
        for transfer in self._transfers:
            source = origins.get(transfer.source, transfer.source)
            origins[transfer.destination] = source
            if transfer.destination in named:
                transfers.append(Transfer(source, transfer.destination))
        return changes, transfers
