"""Checks a plan's spans against the block tables of a layer group, and prepares them once in the
form that its kernels take.

Token i of a span is at position p = first_position + i of its sequence and is written to slot
``table[p // block_size] * block_size + p % block_size``. A table that was trimmed has 0 for the
entries behind the attention window; ``max_window_tokens`` says how far back queries may look.

Computed by native code and numpy: torch would wake its threads, even for tensors as small as a
decode step's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from kvplane_kernels import span_rows
from numpy.typing import NDArray

from data_plane.kernels.arguments import HostLengths, SharedPlans
from data_plane.kernels.step_rows import StepRows
from data_plane.memory.upload import upload
from data_plane.plans.plan_columns import ints, refuse
from data_plane.plans.tables.block_tables import BlockTables, Table, no_table, taken_away
from data_plane.tier_keys import tier_key_of
from kvplane.errors import (
    InvalidRequestError,
    SequenceNotFoundError,
    SequenceSwappedError,
    StaleGenerationError,
)
from kvplane.wire import columns
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb

if TYPE_CHECKING:
    from kvplane_kernels._native import SpanRows

AT_SPANS = "plan.spans"
# Entries of the block tables that kernels get, padded to the longest: 1 GiB.
MAX_PADDED_ENTRIES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch(StepRows):
    """A plan's spans as attention needs them: S spans of T tokens in all. Arrays are on the host;
    tensors too unless moved with ``to``. Each span's table ends with its last token; padding and
    trimmed entries are 0.
    """

    group: int
    """The layer group whose tables these are."""
    sequence_ids: NDArray[np.int64]
    """[S]: the sequence of each span."""
    first_positions: NDArray[np.int64]
    """[S]: the position of each span's first token in its sequence."""
    starts: NDArray[np.int64]
    """[S + 1]: span s has the tokens [starts[s], starts[s + 1])."""
    written_blocks: NDArray[np.int64]
    """Device blocks written, each listed once for each span that writes it."""
    num_written: NDArray[np.int64]
    """For each of ``written_blocks``, how many leading slots are written after the plan."""
    written_by: NDArray[np.int64]
    """For each of ``written_blocks``, the span that writes it."""

    @property
    def num_spans(self) -> int:
        """Number of spans, S."""
        return len(self.sequence_ids)

    def num_context_tokens(self, window_tokens: int) -> int:
        """Return how many positions' keys and values attention reads, summed over the spans; with a
        window, 0 for none, only those that some query of the span attends to.
        """
        seen = self.first_positions
        if window_tokens:
            seen = np.minimum(seen, window_tokens - 1)
        return int(seen.sum()) + self.num_tokens

    def span_of(self, sequence_id: int, field: str = "sequence_id") -> int:
        """Return a sequence's span by its index. Raises InvalidRequestError naming ``field`` if
        there is none.
        """
        spans = np.flatnonzero(self.sequence_ids == sequence_id)
        if not len(spans):
            raise InvalidRequestError(
                f"the plan computes no tokens of sequence {sequence_id}", field=field
            )
        return int(spans[0])

    def reads_of_others(self, num_blocks: int, block_size: int) -> NDArray[np.bool_]:
        """Return [S, entries]: which entries before a span's first block hold a block that another
        span writes; trimmed ones may too. This batch has to be on the host. ``num_blocks``: of the
        pool.
        """
        is_written = np.zeros(num_blocks, np.bool_)
        is_written[self.written_blocks] = True
        tables = self.block_tables.numpy()
        is_before = np.arange(tables.shape[1]) < self.first_positions[:, None] // block_size
        reads: NDArray[np.bool_] = is_written[tables] & is_before
        return reads

    def of_pass(self, index: int) -> AttentionBatch:
        """Return a batch of token ``index`` of each span that is long enough: one token a sequence.
        This batch has to be on the host; so is the result.
        """
        starts, ids, first = self.starts, self.sequence_ids, self.first_positions
        tables = self.block_tables
        places = starts[:-1] + index
        is_there = places < starts[1:]
        if not is_there.all():
            places, ids, first = places[is_there], ids[is_there], first[is_there]
            tables = torch.from_numpy(tables.numpy()[is_there])
        rows, first = np.arange(len(ids) + 1), first + index
        lens = first + 1
        assert self.lengths is not None
        return AttentionBatch(
            group=self.group,
            sequence_ids=ids,
            first_positions=first,
            num_tokens=len(ids),
            starts=rows,
            max_tokens=1,
            slots=torch.from_numpy(self.slots.numpy()[places]),
            block_tables=tables,
            query_starts=torch.from_numpy(rows),
            context_lens=torch.from_numpy(lens),
            lengths=HostLengths(rows, lens, self.lengths.tables_may_share),
            written_blocks=self.written_blocks,
            num_written=self.num_written,
            written_by=self.written_by,
            max_window_tokens=self.max_window_tokens,
        )

    def to(self, device: torch.device) -> AttentionBatch:
        """Return the batch with its tensors on ``device``. Does not wait for the device."""
        if device.type == "cpu":
            return self
        here = [self.slots, self.block_tables, self.query_starts, self.context_lens]
        slots, block_tables, query_starts, context_lens = upload(here, device)
        return replace(
            self,
            slots=slots,
            block_tables=block_tables,
            query_starts=query_starts,
            context_lens=context_lens,
            plans=SharedPlans(),
        )


def prepare_batch(
    tables: BlockTables, session_id: int, spans: plan_pb2.Spans, group: int = 0
) -> AttentionBatch:
    """Check a plan's spans and compute what the kernels need for a layer group.

    Raises InvalidRequestError, SequenceNotFoundError, SequenceSwappedError and
    StaleGenerationError, naming the field.
    """
    sequence_ids = ints(columns.INT64, spans.sequence_ids, f"{AT_SPANS}.sequence_ids")
    num_spans = len(sequence_ids)
    first = ints(columns.INT32, spans.first_positions, f"{AT_SPANS}.first_positions", num_spans)
    counts = ints(columns.INT32, spans.num_tokens, f"{AT_SPANS}.num_tokens", num_spans)
    found = _tables_of(tables.of_session(session_id, group), sequence_ids, group)
    check_entries(tables, found, sequence_ids)
    blocks = [table.blocks for table in found]
    trimmed = np.fromiter(map(attrgetter("num_trimmed"), found), np.int64, num_spans)
    size = tables.block_size_tokens
    most_tokens = tables.num_blocks[tier_key_of(group, pb.TIER_DEVICE)] * size
    rows = span_rows(first, counts, trimmed, blocks, size, most_tokens, MAX_PADDED_ENTRIES)
    if rows is None:
        lengths = np.fromiter(map(len, blocks), np.int64, num_spans)
        _check_positions(first, counts, trimmed * size, lengths * size)
        raise _too_large(first, counts, size, most_tokens)
    return _batch(group, sequence_ids, first, rows)


def check_entries(tables: BlockTables, found: list[Table], sequence_ids: NDArray[np.int64]) -> None:
    """Raise StaleGenerationError if one of these tables has a block allocated again since."""
    i = tables.first_stale(found)
    if i is not None:
        at = f"{AT_SPANS}.sequence_ids[{i}]"
        raise StaleGenerationError(taken_away(int(sequence_ids[i])), field=at)


def _tables_of(
    tables: Mapping[int, Table], sequence_ids: NDArray[np.int64], group: int
) -> list[Table]:
    """Return each span's table. Raises for a table on the host, and for two spans of one."""
    ids = sequence_ids.tolist()
    found = list(map(tables.get, ids))
    if None in found:
        i = found.index(None)
        raise SequenceNotFoundError(no_table(ids[i]), field=f"{AT_SPANS}.sequence_ids[{i}]")
    if len(set(ids)) != len(ids):
        again = np.ones(len(ids), np.bool_)
        again[np.unique(sequence_ids, return_index=True)[1]] = False
        refuse(
            again,
            InvalidRequestError,
            lambda i: f"sequence {ids[i]} is in two spans: a plan computes it in one",
            f"{AT_SPANS}.sequence_ids",
        )
    tier_key = tier_key_of(group, pb.TIER_DEVICE)
    for i, table in enumerate(found):
        if table.tier_key != tier_key:  # type: ignore[union-attr]
            raise SequenceSwappedError(
                f"sequence {ids[i]} is in the host tier: it has to be swapped in first",
                field=f"{AT_SPANS}.sequence_ids[{i}]",
            )
    return found  # type: ignore[return-value]


def _check_positions(
    first: NDArray[np.int64],
    counts: NDArray[np.int64],
    trimmed: NDArray[np.int64],
    num_slots: NDArray[np.int64],
) -> None:
    """Check the positions of spans against their tables. ``trimmed``: positions dropped from the
    front of each table.
    """
    refuse(
        (first < trimmed) | (first >= num_slots),
        InvalidRequestError,
        lambda i: (
            f"the table has slots for positions {trimmed[i]} to {num_slots[i] - 1}, not for "
            f"{first[i]}"
        ),
        f"{AT_SPANS}.first_positions",
    )
    refuse(
        (counts < 1) | (counts > num_slots - first),
        InvalidRequestError,
        lambda i: (
            f"must be 1 to {num_slots[i] - first[i]}, the slots that the table has from position "
            f"{first[i]} on, is {counts[i]}"
        ),
        f"{AT_SPANS}.num_tokens",
    )


def _too_large(
    first: NDArray[np.int64], counts: NDArray[np.int64], block_size: int, num_slots: int
) -> InvalidRequestError:
    """Return the error for spans that cannot all be written: each token needs its own slot, but
    tables may share blocks and so claim far more than the pool's ``num_slots``.
    """
    if (num_tokens := int(counts.sum())) > num_slots:
        return InvalidRequestError(
            f"the spans have {num_tokens} tokens, and the pool has {num_slots} slots to write them",
            field=f"{AT_SPANS}.num_tokens",
        )
    longest = -(-int((first + counts).max(initial=0)) // block_size)
    return InvalidRequestError(
        f"{len(first)} tables of up to {longest} entries make {len(first) * longest}, and may make "
        f"{MAX_PADDED_ENTRIES}: compute the longest sequences in a plan of their own",
        field=f"{AT_SPANS}.sequence_ids",
    )


def _batch(
    group: int, sequence_ids: NDArray[np.int64], first: NDArray[np.int64], rows: SpanRows
) -> AttentionBatch:
    """Build the batch from ``rows``, which native code computed for the spans."""
    starts, lens, block_tables, slots, written, num_written, written_by, most, window = rows
    return AttentionBatch(
        group=group,
        sequence_ids=sequence_ids,
        first_positions=first,
        num_tokens=len(slots),
        starts=starts,
        max_tokens=most,
        slots=torch.from_numpy(slots),
        block_tables=torch.from_numpy(block_tables),
        query_starts=torch.from_numpy(starts),
        context_lens=torch.from_numpy(lens),
        lengths=HostLengths(starts, lens, _may_share(block_tables)),
        written_blocks=written,
        num_written=num_written,
        written_by=written_by,
        max_window_tokens=window,
    )


def _may_share(block_tables: NDArray[np.int32]) -> bool:
    """Return whether two tables begin with the same block."""
    if len(block_tables) < 2:
        return False
    first = np.sort(block_tables[:, 0])
    return bool((first[1:] == first[:-1]).any())
