"""From a step's operations to one plan: table changes, transfers, spans.

Check, count, then change: everything of an item that can fail is checked, and the blocks it needs
are counted, before its first change. So an item that fails has changed nothing.

    item ──checks──► counts blocks ──room?──► blocks change ──► changes, transfers, spans
               │                       │
               └─ FAILED (typed error) └─ LATER, NEVER (shortage)
"""

from __future__ import annotations

from collections.abc import Sequence as Operations
from typing import Final

from control_plane.planning.sequence import Sequence
from control_plane.planning.session import Session
from control_plane.planning.steps import checks
from control_plane.planning.steps.append import append
from control_plane.planning.steps.draft import Draft
from control_plane.planning.steps.failures import Failures
from control_plane.planning.steps.publish import expect_publication, publish
from control_plane.planning.steps.room import (
    NoRoom,
    require_fits,
    require_room,
    require_room_to_admit,
)
from kvplane import columns
from kvplane.columns import INT32, INT64
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    QuotaExceededError,
    SequenceBusyError,
    SequenceExistsError,
    SequenceSwappedError,
)
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

_DEVICE: Final = tpb.TIER_DEVICE
_HOST: Final = tpb.TIER_HOST
_TIER_NAMES: Final = {_DEVICE: "device", _HOST: "host"}


def num_items(operations: Operations[cpb.Operation]) -> int:
    """Items of all operations, from the lengths of their columns; each operation counts at least
    one, and a swap as many as the sequences that it moves.
    """
    num = 0
    for operation in operations:
        kind = operation.WhichOneof("operation")
        ids = b"" if kind in (None, "admit") else getattr(operation, kind).sequence_ids
        num += max(1, columns.count(INT64, ids))
    return num


def may_plan(operation: cpb.Operation) -> bool:
    """Whether the operation may need a plan: all but an Append of tokens without slots."""
    is_append = operation.WhichOneof("operation") == "append"
    return not is_append or bool(operation.append.num_slots.strip(b"\0"))


class Planner:
    """Runs the operations of one step."""

    def __init__(
        self, session: Session, draft: Draft, *, max_sequences: int, max_table_entries: int
    ) -> None:
        self._session = session
        self._pool = session.pool
        self._draft = draft
        self._max_sequences = max_sequences
        self._max_table_entries = max_table_entries
        self._num_table_entries: int | None = None  # counted at the first fork

    def run(self, index: int, operation: cpb.Operation) -> cpb.OperationResult:
        """Do the items of an operation that can be done. ``index`` is its place in the step."""
        kind = operation.WhichOneof("operation")
        failures = Failures(f"operations[{index}].{kind}" if kind else f"operations[{index}]")
        result = cpb.OperationResult()
        try:
            match kind:
                case "append":
                    result.append.CopyFrom(append(self._draft, operation.append, failures))
                case "admit":
                    result.admit.CopyFrom(self._admit(operation.admit))
                case "fork":
                    result.fork.CopyFrom(self._fork(operation.fork, failures))
                case "free":
                    result.free.CopyFrom(self._free(operation.free, failures))
                case "swap_out":
                    result.swap_out.CopyFrom(self._swap_out(operation.swap_out))
                case "swap_in":
                    result.swap_in.CopyFrom(self._swap_in(operation.swap_in))
                case _:
                    raise InvalidRequestError("is not an operation that is known here")
        except (NoRoom, KvplaneError) as error:
            failures.add(error)
        result.failures.extend(failures.items)
        return result

    # Operations

    def _admit(self, message: cpb.Admit) -> cpb.AdmitResult:
        session, pool, draft = self._session, self._pool, self._draft
        token_ids = message.token_ids
        self._check_new_sequence(message.sequence_id, "sequence_id")
        checks.token_ids(token_ids, at_least=1, field="token_ids")
        checks.count(message.max_total_tokens, field="max_total_tokens")
        checks.count(message.num_compute_tokens, field="num_compute_tokens")
        num_tokens = len(token_ids) // 4
        num_blocks = checks.div_ceil(num_tokens, pool.block_size)
        need = max(num_blocks, checks.div_ceil(message.max_total_tokens, pool.block_size))
        require_fits(pool, need)
        hits: list[int] = []
        if not message.skip_prefix_lookup:
            hits = pool.device.index.match(session.root, token_ids)
        hits, copies_last = require_room_to_admit(session, need, num_blocks, num_tokens, hits)

        num_cached = min(len(hits) * pool.block_size, num_tokens - 1)
        sequence = Sequence(message.sequence_id, draft.number, token_ids, need)
        sequence.num_cached = sequence.num_written = sequence.num_scheduled = num_cached
        sequence.num_published = len(hits)
        if hits:
            sequence.chain = (hits[-1], pool.device.generation[hits[-1]])
        shared = hits[:-1] if copies_last else hits
        session.add(sequence)
        session.share(_DEVICE, hits)
        new = draft.allocate(_DEVICE, num_blocks - len(shared))
        sequence.table = shared + new
        if copies_last:
            # The whole prompt is cached. Its last token is computed again, into a copy, because a
            # published block is never written.
            draft.transfer(_DEVICE, hits[-1], _DEVICE, new[0])
            pool.counters.num_copies_on_write += 1
            draft.release(_DEVICE, [hits[-1]])
        draft.set(sequence, 0, bytes(len(shared)) + b"\1" * len(new))
        num_compute = num_tokens - num_cached
        if message.HasField("num_compute_tokens"):
            num_compute = min(num_compute, message.num_compute_tokens)
        draft.span(sequence, num_compute)
        if not message.skip_prefix_lookup:
            pool.counters.num_lookup_tokens += num_tokens
            pool.counters.num_hit_tokens += num_cached
        return cpb.AdmitResult(
            num_cached_tokens=num_cached, num_blocks=num_blocks, num_scheduled_tokens=num_compute
        )

    def _fork(self, message: cpb.Fork, failures: Failures) -> cpb.ForkResult:
        ids = columns.read(INT64, message.sequence_ids, "sequence_ids")
        parents = columns.read(
            INT64, message.parent_sequence_ids, "parent_sequence_ids", length=len(ids)
        )
        num_blocks = columns.zeros(INT32, len(ids))
        for item, (parent_id, sequence_id) in enumerate(zip(parents, ids, strict=True)):
            try:
                num_blocks[item] = self._fork_one(parent_id, sequence_id)
            except KvplaneError as error:
                failures.add(error, item)
        return cpb.ForkResult(num_blocks=columns.pack(INT32, num_blocks))

    def _fork_one(self, parent_id: int, sequence_id: int) -> int:
        session, draft = self._session, self._draft
        parent = session.sequence(parent_id, field="parent_sequence_ids")
        self._check_new_sequence(sequence_id, "sequence_ids")
        self._check_idle(parent, "parent_sequence_ids")
        self._count_table_entries(parent)
        child = parent.fork(sequence_id, draft.number)
        session.share(child.tier, child.table)
        session.add(child)
        if child.table_sent:
            draft.changes.fork(child.id, parent.id, len(child.table))
        # Receipts of plans that the parent waits for count for the child too.
        draft.touched.append(child)
        for record in session.plans.values():
            record.touched.append(child)
        return len(child.table)

    def _free(self, message: cpb.Free, failures: Failures) -> cpb.FreeResult:
        ids = columns.read(INT64, message.sequence_ids, "sequence_ids")
        num_released = columns.zeros(INT32, len(ids))
        for item, sequence_id in enumerate(ids):
            try:
                num_released[item] = self._free_one(sequence_id)
            except KvplaneError as error:
                failures.add(error, item)
        return cpb.FreeResult(num_released_blocks=columns.pack(INT32, num_released))

    def _free_one(self, sequence_id: int) -> int:
        session, draft = self._session, self._draft
        sequence = session.sequence(sequence_id, field="sequence_ids")
        self._check_idle(sequence, "sequence_ids")
        # Tokens may have become known since the last receipt.
        self._pool.announce(session.root, publish(session, sequence))
        num_released = draft.release(sequence.tier, sequence.table)
        if not expect_publication(session, sequence):
            sequence.table = []
        session.remove(sequence)
        if sequence.table_sent:
            draft.changes.drop(sequence.id)
        return num_released

    def _swap_out(self, message: cpb.SwapOut) -> cpb.SwapResult:
        num_blocks = self._swap(message.sequence_ids, _DEVICE, _HOST)
        self._pool.counters.num_swapped_out_blocks += num_blocks
        return cpb.SwapResult(num_blocks=num_blocks)

    def _swap_in(self, message: cpb.SwapIn) -> cpb.SwapResult:
        num_blocks = self._swap(message.sequence_ids, _HOST, _DEVICE)
        self._pool.counters.num_swapped_in_blocks += num_blocks
        return cpb.SwapResult(num_blocks=num_blocks)

    def _swap(self, column: bytes, source: tpb.Tier, destination: tpb.Tier) -> int:
        """Move sequences between the tiers; returns how many blocks are copied."""
        ids = columns.read(INT64, column, "sequence_ids")
        if not ids or len(set(ids)) != len(ids):
            raise InvalidRequestError("must be one or more distinct ids", field="sequence_ids")
        sequences = []
        for i, sequence_id in enumerate(ids):
            field = f"sequence_ids[{i}]"
            sequence = self._session.sequence(sequence_id, field=field)
            self._check_idle(sequence, field)
            if sequence.tier != source:
                raise SequenceSwappedError(
                    f"sequence {sequence_id} is on the {_TIER_NAMES[sequence.tier]} tier already",
                    field=field,
                )
            sequences.append(sequence)
        blocks = list(dict.fromkeys(block for sequence in sequences for block in sequence.table))
        require_fits(self._pool, len(blocks), destination)
        require_room(self._session, destination, len(blocks))
        self._move(sequences, blocks, source, destination)
        return len(blocks)

    def _move(
        self,
        sequences: list[Sequence],
        blocks: list[int],
        source: tpb.Tier,
        destination: tpb.Tier,
    ) -> None:
        """Copy ``blocks`` to the other tier, and refer to the copies in the sequences' tables."""
        session, draft = self._session, self._draft
        copies = dict(zip(blocks, draft.allocate(destination, len(blocks)), strict=True))
        for block, copy in copies.items():
            draft.transfer(source, block, destination, copy)
        used: set[int] = set()
        for sequence in sequences:
            table = [copies[block] for block in sequence.table]
            session.share(destination, [copy for copy in table if copy in used])
            allocated = bytes(copy not in used for copy in table)
            used.update(table)
            draft.release(source, sequence.table)
            sequence.table, sequence.tier = table, destination
            sequence.moved_by = draft.number
            sequence.unpublish()
            draft.touched.append(sequence)
            if table:
                draft.set(sequence, 0, allocated, replace=True)

    # Checks, before the first change

    def _check_new_sequence(self, sequence_id: int, field: str) -> None:
        checks.identifier(sequence_id, field=field)
        if sequence_id in self._session.sequences:
            raise SequenceExistsError(f"sequence {sequence_id} is live already", field=field)
        if len(self._session.sequences) >= self._max_sequences:
            raise QuotaExceededError(
                f"{self._max_sequences} sequences are live: free one first", field=field
            )

    def _count_table_entries(self, parent: Sequence) -> None:
        """Add those that a fork of ``parent`` has. A fork copies the table and the tokens, so that
        a small request could otherwise take memory and time without bound.
        """
        num = self._num_table_entries
        if num is None:
            num = sum(map(self._table_entries, self._session.sequences.values()))
        most, more = self._max_table_entries, self._table_entries(parent)
        self._num_table_entries = num
        if num + more > most:
            raise QuotaExceededError(
                f"the session's block tables have {num} entries, and may have {most}, {more} more "
                "are needed: free sequences first",
                field="sequence_ids",
            )
        self._num_table_entries = num + more

    def _table_entries(self, sequence: Sequence) -> int:
        num_known = checks.div_ceil(sequence.num_tokens, self._pool.block_size)
        return max(len(sequence.table), num_known)

    def _check_idle(self, sequence: Sequence, field: str) -> None:
        if self._draft.computes(sequence):
            raise SequenceBusyError(
                f"sequence {sequence.id} computes tokens in this step: wait for the next",
                field=field,
            )
