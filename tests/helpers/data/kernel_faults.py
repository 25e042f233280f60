"""Faults to plant in an executor's kernels, to show that output checks notice them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backend import Kernels


def with_fault(kernels: Kernels, fault: str) -> Kernels:
    """Return the kernels with one fault of ``FAULTS``."""
    return FAULTS[fault](kernels)


def with_operations(kernels: Kernels, **operations: Callable[..., Any]) -> Kernels:
    """Return the kernels with other operations in place of those named, one call for each."""
    changed = copy.copy(kernels)
    changed.bound_layers = lambda: None  # type: ignore[method-assign]
    for name, operation in operations.items():
        setattr(changed, name, operation)
    return changed


def _zero_attention(kernels: Kernels) -> Kernels:
    def paged_attention(arguments: AttentionArguments) -> torch.Tensor:
        return torch.zeros_like(arguments.query)

    return with_operations(kernels, paged_attention=paged_attention)


def _swap_two_blocks(kernels: Kernels) -> Kernels:
    """Exchange the first two blocks of every table."""

    def swap(block_tables: torch.Tensor) -> torch.Tensor:
        swapped = block_tables.clone()
        swapped[:, :2] = block_tables[:, :2].flip(1)
        return swapped

    return _with_tables(kernels, swap)


def _shift_table(kernels: Kernels) -> Kernels:
    """Read every table from its second entry on."""

    def shift(block_tables: torch.Tensor) -> torch.Tensor:
        return block_tables.roll(-1, dims=1)

    return _with_tables(kernels, shift)


def _skip_newest_slot(kernels: Kernels) -> Kernels:
    """Skip the last slot of every run of slots, which holds the newest token."""

    def reshape_and_cache(arguments: WriteArguments) -> None:
        slots = arguments.slots
        ends_run = torch.ones_like(slots, dtype=torch.bool)
        ends_run[:-1] = slots[1:] != slots[:-1] + 1
        kernels.reshape_and_cache(replace(arguments, slots=torch.where(ends_run, -1, slots)))

    return with_operations(kernels, reshape_and_cache=reshape_and_cache)


def _with_tables(kernels: Kernels, change: Callable[[torch.Tensor], torch.Tensor]) -> Kernels:
    def paged_attention(arguments: AttentionArguments) -> torch.Tensor:
        tables = change(arguments.block_tables)
        return kernels.paged_attention(replace(arguments, block_tables=tables))

    return with_operations(kernels, paged_attention=paged_attention)


FAULTS: dict[str, Callable[[Kernels], Kernels]] = {
    "zero-attention": _zero_attention,
    "swap-two-blocks": _swap_two_blocks,
    "skip-newest-slot": _skip_newest_slot,
    "shift-table": _shift_table,
}
