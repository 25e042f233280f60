"""Append: grows sequences, all those of an operation in columns.

In most decode steps a sequence writes one slot of a block that no other sequence uses: that costs a
few comparisons of integers. Only a sequence that crosses a block boundary, or writes a shared
block, costs more.
"""

from __future__ import annotations

from itertools import compress
from typing import Final

from control_plane.planning.steps import checks, room
from control_plane.planning.steps.draft import Draft
from control_plane.planning.steps.failures import Failures
from kvplane import columns
from kvplane.columns import INT32, INT64
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    PositionMismatchError,
    SequenceSwappedError,
)
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

_DEVICE: Final = tpb.TIER_DEVICE


def append(draft: Draft, message: cpb.Append, failures: Failures) -> cpb.AppendResult:
    """Extend each sequence that can be extended; the others go to ``failures``.

    Raises InvalidRequestError when the columns cannot be read; then nothing has changed.
    """
    ids = columns.read(INT64, message.sequence_ids, "sequence_ids")
    num = len(ids)
    firsts = columns.read(INT64, message.first_positions, "first_positions", length=num)
    slots = columns.read(INT32, message.num_slots, "num_slots", length=num)
    given = columns.read(INT32, message.num_tokens, "num_tokens", length=num)
    token_ids = message.token_ids
    checks.token_columns(given, token_ids, at_least=0, at="")
    has_negatives = checks.first_negative(token_ids) is not None

    device, block_size, number = draft.pool.device, draft.pool.block_size, draft.number
    ref_count, pins, entries = device.ref_count, device.pins, device.index.entries
    max_bytes = device.num_blocks * block_size * 4
    live, touch = draft.session.sequences, draft.touched.append
    num_blocks = columns.zeros(INT32, num)
    skipped: list[int] = []  # items that compute nothing
    end = 0
    for item, (sequence_id, first, num_slots, num_given) in enumerate(
        zip(ids, firsts, slots, given, strict=True)
    ):
        begin, end = end, end + 4 * num_given
        sequence = live.get(sequence_id)
        if sequence is not None and sequence.num_scheduled == first and num_slots > 0:
            table, pending, tokens = sequence.table, sequence.pending, sequence.tokens
            index, last = first // block_size, (first + num_slots - 1) // block_size
            if (
                index == last < len(table)
                and sequence.tier == _DEVICE
                and not (pending and pending[-1][0] == number)
                and ref_count[block := table[index]] + pins[block] == 1
                and entries[block] is None
                and len(tokens) + end - begin <= max_bytes
                and not has_negatives
            ):
                tokens += token_ids[begin:end]
                sequence.num_scheduled = stop = first + num_slots
                pending.append((number, stop))
                touch(sequence)
                num_blocks[item] = len(table)
                continue
        try:
            num_blocks[item] = _append_one(
                draft, sequence_id, first, num_slots, token_ids[begin:end]
            )
        except (KvplaneError, room.NoRoom) as error:
            failures.add(error, item)
            skipped.append(item)
        else:
            if not num_slots:
                skipped.append(item)

    spans = draft.spans
    for column, values in (
        (spans.sequence_ids, ids),
        (spans.first_positions, firsts),
        (spans.num_tokens, slots),
    ):
        if skipped:
            computed = bytearray(b"\1") * num
            for item in skipped:
                computed[item] = 0
            column.extend(compress(values, computed))
        else:
            column.extend(values)
    return cpb.AppendResult(num_blocks=columns.pack(INT32, num_blocks))


def _append_one(
    draft: Draft, sequence_id: int, first: int, num_slots: int, token_ids: bytes
) -> int:
    """Extend a sequence, whatever that takes; returns how many blocks its table has.

    The caller fills the span's columns.
    """
    sequence = draft.session.sequence(sequence_id, field="sequence_ids")
    if num_slots < 0:
        raise InvalidRequestError("must not be negative", field="num_slots")
    if checks.first_negative(token_ids) is not None:
        raise InvalidRequestError("must not hold negative values", field="token_ids")
    if sequence.tier != _DEVICE:
        raise SequenceSwappedError(
            f"sequence {sequence_id} is on the host tier: swap it in first", field="sequence_ids"
        )
    if num_slots and draft.computes(sequence):
        raise InvalidRequestError(
            f"sequence {sequence_id} already computes tokens in this step", field="num_slots"
        )
    if first != sequence.num_scheduled:
        raise PositionMismatchError(
            f"the next slot of sequence {sequence_id} is at position {sequence.num_scheduled}, not "
            f"{first}: DescribeSequence tells its positions",
            field="first_positions",
        )
    table, block_size, device = sequence.table, draft.pool.block_size, draft.pool.device
    end = first + num_slots
    num_known = sequence.num_tokens + len(token_ids) // 4
    room.require_fits(draft.pool, checks.div_ceil(max(end, num_known), block_size))
    end_block = checks.div_ceil(end, block_size)
    num_grown = max(0, end_block - len(table))
    unwritable: list[int] = []
    if num_slots:
        written = range(first // block_size, min(end_block, len(table)))
        unwritable = [i for i in written if not device.is_writable(table[i])]
    if unwritable or num_grown:
        room.require_room(draft.session, _DEVICE, len(unwritable) + num_grown)

    sequence.tokens += token_ids
    for i in unwritable:
        draft.copy_on_write(sequence, i, first)
    if num_grown:
        table += draft.allocate(_DEVICE, num_grown)
        draft.set(sequence, len(table) - num_grown, b"\1" * num_grown)
    if num_slots:
        draft.schedule(sequence, num_slots)
    return len(table)
