"""A plan's rows as the kernels take them: checked against the resident tables, computed once.

Token i of a row stands at position p = first_position + i of its sequence and is written to slot
``table[p // block_size] * block_size + p % block_size``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from data_plane.memory.upload import upload
from data_plane.plans.block_tables import ResidentTables, Table
from kvplane.errors import BlockNotWritableError, InvalidRequestError, SequenceSwappedError
from kvplane.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class Rows:
    """S rows of T tokens in all. Tensors are on the CPU unless moved with ``to``."""

    sequence_ids: tuple[int, ...]
    first_positions: tuple[int, ...]
    num_tokens: int
    spans: tuple[tuple[int, int], ...]
    """Row s has the tokens [begin, end)."""
    max_tokens: int
    """The most tokens that a row has; 0 without rows."""
    slots: torch.Tensor
    """[T] int64: where each token is written."""
    block_tables: torch.Tensor
    """[S, max_blocks] int32: each row's table as far as it attends, padded with 0."""
    query_starts: torch.Tensor
    """[S + 1] int64: the rows' spans once more."""
    context_lens: torch.Tensor
    """[S] int64: positions that the row's last token attends to, itself included."""
    written_blocks: tuple[tuple[int, str], ...]
    """Device blocks written, each with the field to blame."""

    def to(self, device: torch.device) -> Rows:
        """The same with the tensors on ``device``, which is not waited for."""
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
        )


def prepare_rows(tables: ResidentTables, session_id: int, plan: pb.Plan) -> Rows:
    """Check ``plan.rows`` and compute what the kernels need.

    Raises InvalidRequestError, SequenceNotFoundError, SequenceSwappedError and BlockNotWritableError,
    naming the field.
    """
    block_size = tables.block_size_tokens
    row_tables: list[Table] = []
    written: list[tuple[int, str]] = []
    seen: set[int] = set()
    for i, row in enumerate(plan.rows):
        at = f"plan.rows[{i}]"
        table = tables.get(session_id, row.sequence_id, f"{at}.sequence_id")
        if row.sequence_id in seen:
            raise InvalidRequestError("is in two rows", field=f"{at}.sequence_id")
        seen.add(row.sequence_id)
        if table.tier != pb.TIER_DEVICE:
            raise SequenceSwappedError("is on the host tier", field=f"{at}.sequence_id")
        num_slots = len(table.blocks) * block_size
        if not 0 <= row.first_position < num_slots:
            raise InvalidRequestError("is outside the table", field=f"{at}.first_position")
        if not 1 <= row.num_tokens <= num_slots - row.first_position:
            raise InvalidRequestError(
                f"must be 1 to {num_slots - row.first_position}, the slots left in the table",
                field=f"{at}.num_tokens",
            )
        first_block = row.first_position // block_size
        end_block = -(-(row.first_position + row.num_tokens) // block_size)
        written += [(index, at) for index in table.blocks[first_block:end_block]]
        row_tables.append(table)
    check_writable(tables, written)
    return _rows(plan, row_tables, tuple(written), block_size)


def check_writable(tables: ResidentTables, blocks: Sequence[tuple[int, str]]) -> None:
    """Raise BlockNotWritableError if a block is published, or named by more than one table entry."""
    for index, field in blocks:
        if index in tables.publications:
            raise BlockNotWritableError(f"block {index} is published", field=field)
        if tables.num_names(pb.TIER_DEVICE, index) != 1:
            raise BlockNotWritableError(f"block {index} is shared", field=field)


def _rows(
    plan: pb.Plan,
    row_tables: list[Table],
    written: tuple[tuple[int, str], ...],
    block_size: int,
) -> Rows:
    first = torch.tensor([row.first_position for row in plan.rows], dtype=torch.int64)
    counts = torch.tensor([row.num_tokens for row in plan.rows], dtype=torch.int64)
    context_lens = first + counts
    num_rows = len(plan.rows)
    num_blocks = ((context_lens + block_size - 1) // block_size).tolist()
    block_tables = torch.zeros((num_rows, max(num_blocks, default=0)), dtype=torch.int32)
    for i, table in enumerate(row_tables):
        entries = torch.frombuffer(table.blocks, dtype=torch.int64, count=num_blocks[i])
        block_tables[i, : num_blocks[i]] = entries
    query_starts = torch.zeros(num_rows + 1, dtype=torch.int64)
    query_starts[1:] = counts.cumsum(0)
    row_of_token = torch.repeat_interleave(torch.arange(num_rows), counts)
    starts = query_starts.tolist()
    num_tokens = starts[-1]
    positions = torch.arange(num_tokens) - query_starts[row_of_token] + first[row_of_token]
    blocks = block_tables[row_of_token, positions // block_size].to(torch.int64)
    return Rows(
        sequence_ids=tuple(row.sequence_id for row in plan.rows),
        first_positions=tuple(row.first_position for row in plan.rows),
        num_tokens=num_tokens,
        spans=tuple(itertools.pairwise(starts)),
        max_tokens=max((row.num_tokens for row in plan.rows), default=0),
        slots=blocks * block_size + positions % block_size,
        block_tables=block_tables,
        query_starts=query_starts,
        context_lens=context_lens,
        written_blocks=written,
    )
