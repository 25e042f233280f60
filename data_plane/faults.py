"""Ways to plant a fault in the kernels that an executor calls, whichever set it is.

Faults are for tests only: they show that what checks the output would notice. ``--fault`` of the
server chooses one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from data_plane.kernels.backend import KernelSet, PagedAttention, ReshapeAndCache
from kvplane.errors import InvalidRequestError

FAULTS: Final = ("none", "zero-attention", "swap-two-blocks", "skip-newest-slot", "shift-table")


def with_fault(kernels: KernelSet, fault: str) -> KernelSet:
    """The kernels with one fault of ``FAULTS``. Raises InvalidRequestError for another name."""
    attention = kernels.paged_attention
    if fault == "none":
        return kernels
    if fault == "zero-attention":
        return replace(kernels, paged_attention=_zero_attention)
    if fault == "swap-two-blocks":
        return replace(kernels, paged_attention=_with_tables(attention, _swap_two_blocks))
    if fault == "skip-newest-slot":
        return replace(kernels, reshape_and_cache=_skip_newest_slot(kernels.reshape_and_cache))
    if fault == "shift-table":
        return replace(kernels, paged_attention=_with_tables(attention, _shift))
    raise InvalidRequestError(f"must be one of {', '.join(FAULTS)}", field="fault")


def _zero_attention(query: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
    return torch.zeros_like(query)


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


def _swap_two_blocks(block_tables: torch.Tensor) -> torch.Tensor:
    """The first two blocks of every table change places."""
    swapped = block_tables.clone()
    swapped[:, :2] = block_tables[:, :2].flip(1)
    return swapped


def _shift(block_tables: torch.Tensor) -> torch.Tensor:
    """Every table is read from its second entry on."""
    return block_tables.roll(-1, dims=1)


def _skip_newest_slot(write: ReshapeAndCache) -> ReshapeAndCache:
    """The last slot of every run of slots, which a row's newest token is in, is not written."""

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

    return reshape_and_cache
