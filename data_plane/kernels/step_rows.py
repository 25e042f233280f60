"""Arguments of a layer group's kernels for one step, the same for all of its layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from data_plane.kernels.arguments import HostLengths, SharedPlans


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """A layer group's slots, tables and lengths in a step of S sequences with T tokens."""

    num_tokens: int
    """T, the number of tokens of all sequences."""
    max_tokens: int
    """Maximum number of tokens of a sequence."""
    slots: torch.Tensor
    """[T] int64: where each token is written; negative: nowhere."""
    block_tables: torch.Tensor
    """[S, max_blocks] int32: the blocks of each sequence."""
    query_starts: torch.Tensor
    """[S + 1] int64: sequence s has the tokens [query_starts[s], query_starts[s + 1])."""
    context_lens: torch.Tensor
    """[S] int64: positions that the sequence's last token attends to, itself included."""
    lengths: HostLengths | None
    """query_starts and context_lens on the host; None where only the device knows them."""
    max_window_tokens: int | None = None
    """The widest attention window that reads no trimmed entry; None when none is trimmed."""
    is_padded: bool = False
    """Whether the last tokens may belong to no sequence."""
    plans: SharedPlans = field(default_factory=SharedPlans)
    """Plans shared by the layers that attend with these tensors."""
