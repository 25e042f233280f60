"""One sequence as the core keeps it.

    0 ............ num_written ............ num_scheduled ............ len(table) * block size
    | receipted    | some plan in flight    | blocks allocated ahead
    |              | writes these           |
    tokens known: [0, num_tokens), anywhere up to the end of the table or beyond what is scheduled

Invariant: num_cached <= num_written <= num_scheduled <= len(table) * block size; pending ends rise
with their plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from control_plane.blocks.prefix_index import NO_BLOCK
from kvplane import columns
from kvplane.columns import INT32, INT64, UINT8
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

_DEVICE: Final = tpb.TIER_DEVICE


class Sequence:
    """State of a live sequence; what changes it is in other modules."""

    __slots__ = (
        "admitted_by",
        "chain",
        "generations",
        "id",
        "moved_by",
        "need",
        "num_cached",
        "num_published",
        "num_scheduled",
        "num_written",
        "pending",
        "table",
        "table_sent",
        "tier",
        "tokens",
    )

    def __init__(
        self, sequence_id: int, admitted_by: int, tokens: bytes | bytearray, need: int
    ) -> None:
        self.id = sequence_id
        self.admitted_by = admitted_by  # number of the step that admitted or forked it
        self.tokens = bytearray(tokens)
        self.need = need  # device blocks that its session is guaranteed for it
        self.table: list[int] = []
        self.tier: tpb.Tier = _DEVICE
        self.num_cached = 0
        self.num_written = 0
        self.num_scheduled = 0
        self.pending: list[tuple[int, int]] = []  # (plan, end of what it writes)
        self.moved_by = 0  # the plan whose transfers fill the table
        self.num_published = 0  # leading blocks that the index has, or has in another block
        self.chain = (NO_BLOCK, 0)  # the index's block for the last of them, its generation
        # Generations of the table's blocks when it was freed before its last receipts; else None.
        self.generations: list[int] | None = None
        # Whether the data plane will have a table for it once the last plan has run.
        self.table_sent = False

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return len(self.tokens) // 4

    def num_complete(self, block_size: int) -> int:
        """Leading blocks that are full, their tokens known and all their slots written."""
        num_known, num_written = len(self.tokens) // 4, self.num_written
        return (num_written if num_written < num_known else num_known) // block_size

    def fork(self, sequence_id: int, number: int) -> Sequence:
        """A new sequence, of step ``number``, with the same blocks; the caller adds the
        references.
        """
        child = Sequence(sequence_id, number, self.tokens, self.need)
        child.table = list(self.table)
        child.tier = self.tier
        child.num_cached = self.num_cached
        child.num_written = self.num_written
        child.num_scheduled = self.num_scheduled
        child.pending = list(self.pending)
        child.moved_by = self.moved_by
        child.num_published = self.num_published
        child.chain = self.chain
        child.table_sent = self.table_sent
        return child

    def cut(self) -> None:
        """Forget all but the tokens whose KV is written. The caller cuts the table."""
        del self.tokens[self.num_written * 4 :]
        self.num_written = min(self.num_written, self.num_tokens)
        self.num_scheduled = self.num_written
        self.num_cached = min(self.num_cached, self.num_written)
        self.pending.clear()
        self.unpublish()

    def unpublish(self) -> None:
        """The table holds other blocks now: publishing begins again at its first."""
        self.num_published, self.chain = 0, (NO_BLOCK, 0)


def states(sequences: Iterable[Sequence]) -> cpb.SequenceStates:
    """The sequences as the contract describes them, ordered by id."""
    ordered = sorted(sequences, key=lambda sequence: sequence.id)
    return cpb.SequenceStates(
        sequence_ids=columns.pack(INT64, [s.id for s in ordered]),
        admitted_by=columns.pack(INT64, [s.admitted_by for s in ordered]),
        num_tokens=columns.pack(INT64, [s.num_tokens for s in ordered]),
        num_scheduled_tokens=columns.pack(INT64, [s.num_scheduled for s in ordered]),
        num_written_tokens=columns.pack(INT64, [s.num_written for s in ordered]),
        num_cached_tokens=columns.pack(INT64, [s.num_cached for s in ordered]),
        num_blocks=columns.pack(INT32, [len(s.table) for s in ordered]),
        tiers=columns.pack(UINT8, [s.tier for s in ordered]),
    )
