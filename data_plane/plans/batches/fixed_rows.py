"""Buffers that hold the rows of one step after another, so that a CUDA graph which reads them can
be replayed for each step.

    packed   slots [T] | query_starts [S + 1] | context_lens [S]     int64, one copy from the host
    tables   [S, max_blocks]                                         int32

Between steps the buffers hold no row: a replay then writes and attends to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from data_plane.kernels.arguments import HostLengths, require
from data_plane.kernels.step_rows import StepRows
from data_plane.plans.batches.attention_batch import MAX_PADDED_ENTRIES, AttentionBatch

_MOST = 2**30  # of tokens: positions are 32 bits wide in the kernels


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Bounds of the steps that a captured graph can run. Raises InvalidRequestError naming the
    bound that is out of range.
    """

    num_tokens: int
    """Maximum number of tokens that all sequences of a step compute."""
    context_tokens: int
    """Maximum number of tokens of one sequence, those of the step included."""
    num_sequences: int = 0
    """Maximum number of sequences of a step; 0 for as many as tokens."""
    query_tokens: int = 1
    """Maximum number of tokens that one sequence of a step computes."""

    def __post_init__(self) -> None:
        if self.num_sequences == 0:
            object.__setattr__(self, "num_sequences", self.num_tokens)
        for field in fields(self):
            most = self.num_tokens if field.name in ("num_sequences", "query_tokens") else _MOST
            value = getattr(self, field.name)
            require(1 <= value <= most, f"must be 1 to {most}, is {value}", f"bounds.{field.name}")


class FixedRows:
    """Buffers at fixed addresses for the slots, tables and lengths of a layer group's steps."""

    def __init__(self, bounds: StepBounds, block_size: int, device: torch.device) -> None:
        """Allocate the buffers. Raises InvalidRequestError for tables that would be too large."""
        self._bounds = bounds
        num_tokens, num_sequences = bounds.num_tokens, bounds.num_sequences
        max_blocks = -(-bounds.context_tokens // block_size)
        require(
            num_sequences * max_blocks <= MAX_PADDED_ENTRIES,
            f"{num_sequences} tables of {max_blocks} entries make more than {MAX_PADDED_ENTRIES}",
            "bounds.context_tokens",
        )
        self._sizes = (num_tokens, num_sequences + 1, num_sequences)
        self._starts, self._lens = (np.zeros(n, np.int64) for n in self._sizes[1:])
        host = torch.zeros(sum(self._sizes), dtype=torch.int64)
        host[:num_tokens] = -1
        # Outside of torch's inference mode, tensors that were made in it cannot be filled.
        with torch.inference_mode(False):
            self._empty = host.to(device, copy=True)
            self._packed = self._empty.clone()
            shape = num_sequences, max_blocks
            self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._padded: dict[int, StepRows] = {}

    def padded(self, num_tokens: int) -> StepRows:
        """Return the buffers as a step of ``num_tokens`` reads them. Raises InvalidRequestError for
        more tokens than the bounds allow.
        """
        rows = self._padded.get(num_tokens)
        if rows is None:
            most = self._bounds.num_tokens
            require(
                1 <= num_tokens <= most, f"must have 1 to {most} tokens, has {num_tokens}", "query"
            )
            num_sequences = self._num_sequences(num_tokens)
            starts = self._packed[self._sizes[0] :]
            lens = starts[self._sizes[1] :]
            rows = self._padded[num_tokens] = StepRows(
                num_tokens=num_tokens,
                max_tokens=self._bounds.query_tokens,
                slots=self._packed[:num_tokens],
                block_tables=self._tables[:num_sequences],
                query_starts=starts[: num_sequences + 1],
                context_lens=lens[:num_sequences],
                lengths=None,
                is_padded=True,
            )
        return rows

    def check_fits(self, batch: AttentionBatch) -> None:
        """Raise InvalidRequestError naming a bound if the batch does not fit in the buffers."""
        most_tokens = max(batch.context_lens.tolist(), default=0)
        for name, has in (
            ("num_tokens", batch.num_tokens),
            ("num_sequences", batch.num_spans),
            ("query_tokens", batch.max_tokens),
            ("context_tokens", most_tokens),
        ):
            most = getattr(self._bounds, name)
            require(
                has <= most,
                f"the plan has {has}, and there is room for {most}: run it layer by layer",
                f"bounds.{name}",
            )

    def load(self, batch: AttentionBatch) -> None:
        """Copy a batch on the host, which fits, to the buffers; does not wait for the device."""
        num_spans, pinned = batch.num_spans, self._packed.device.type == "cuda"
        packed = torch.empty(sum(self._sizes), dtype=torch.int64, pin_memory=pinned)
        # By numpy: torch would wake its threads.
        slots, starts, lens = np.split(packed.numpy(), np.cumsum(self._sizes)[:2])
        slots[: batch.num_tokens] = batch.slots.numpy()
        slots[batch.num_tokens :] = -1
        starts[: num_spans + 1] = batch.starts
        starts[num_spans + 1 :] = batch.num_tokens
        lens[:num_spans] = batch.context_lens.numpy()
        lens[num_spans:] = 0
        self._starts, self._lens = starts.copy(), lens.copy()
        tables = torch.empty(batch.block_tables.shape, dtype=torch.int32, pin_memory=pinned)
        tables.numpy()[:] = batch.block_tables.numpy()
        self._packed.copy_(packed, non_blocking=True)
        self._tables[:num_spans, : tables.shape[1]].copy_(tables, non_blocking=True)

    def lengths(self, num_tokens: int) -> HostLengths:
        """Return the lengths of the batch loaded last, as a step of ``num_tokens`` reads it."""
        num_sequences = self._num_sequences(num_tokens)
        return HostLengths(self._starts[: num_sequences + 1], self._lens[:num_sequences])

    def clear(self) -> None:
        """Empty the buffers, after all work queued before."""
        self._packed.copy_(self._empty, non_blocking=True)

    def _num_sequences(self, num_tokens: int) -> int:
        """Return how many sequences a step of ``num_tokens`` can have: each has a token or more."""
        return min(num_tokens, self._bounds.num_sequences)
