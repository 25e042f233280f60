"""Faults to plant in the kernels that an executor is given, to show that what checks its output
would notice them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from data_plane.kernels.backend import KernelSet, PagedAttention


def with_fault(kernels: KernelSet, fault: str) -> KernelSet:
    """The kernels with one fault of ``FAULTS``."""
    return FAULTS[fault](kernels)


def _zero_attention(kernels: KernelSet) -> KernelSet:
    def paged_attention(query: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
        return torch.zeros_like(query)

    return replace(kernels, paged_attention=paged_attention)


def _swap_two_blocks(kernels: KernelSet) -> KernelSet:
    """The first two blocks of every table change places."""

    def swap(block_tables: torch.Tensor) -> torch.Tensor:
        swapped = block_tables.clone()
        swapped[:, :2] = block_tables[:, :2].flip(1)
        return swapped

    return replace(kernels, paged_attention=_with_tables(kernels.paged_attention, swap))


def _shift_table(kernels: KernelSet) -> KernelSet:
    """Every table is read from its second entry on."""

    def shift(block_tables: torch.Tensor) -> torch.Tensor:
        return block_tables.roll(-1, dims=1)

    return replace(kernels, paged_attention=_with_tables(kernels.paged_attention, shift))


def _skip_newest_slot(kernels: KernelSet) -> KernelSet:
    """The last slot of every run of slots, which holds the newest token, is not written."""
    write = kernels.reshape_and_cache

    def reshape_and_cache(
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        **scales: Any,
    ) -> None:
        ends_run = torch.ones_like(slots, dtype=torch.bool)
        ends_run[:-1] = slots[1:] != slots[:-1] + 1
        write(key, value, pages, torch.where(ends_run, -1, slots), **scales)

    return replace(kernels, reshape_and_cache=reshape_and_cache)


def _with_tables(
    attention: PagedAttention, change: Callable[[torch.Tensor], torch.Tensor]
) -> PagedAttention:
    def paged_attention(
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        return attention(query, pages, change(block_tables), *args, **options)

    return paged_attention


FAULTS: dict[str, Callable[[KernelSet], KernelSet]] = {
    "zero-attention": _zero_attention,
    "swap-two-blocks": _swap_two_blocks,
    "skip-newest-slot": _skip_newest_slot,
    "shift-table": _shift_table,
}
