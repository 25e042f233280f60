"""The kernels that an executor calls, and ways to plant a fault in them.

Faults are for tests only: they show that what checks the output would notice. ``--fault`` of the
server chooses one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from data_plane import kernels
from kvplane.errors import InvalidRequestError

FAULTS: Final = ("none", "zero-attention", "swap-two-blocks", "skip-newest-slot", "shift-table")


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operations of ``data_plane.kernels``, each replaceable."""

    reshape_and_cache: Callable[..., None] = kernels.reshape_and_cache
    paged_attention: Callable[..., Any] = kernels.paged_attention
    copy_blocks: Callable[..., None] = kernels.copy_blocks
    swap_blocks: Callable[..., None] = kernels.swap_blocks
    gather_blocks: Callable[..., torch.Tensor] = kernels.gather_blocks


def kernels_with(fault: str) -> Kernels:
    """The kernels with one fault of ``FAULTS``. Raises InvalidRequestError for another name."""
    if fault == "none":
        return Kernels()
    if fault == "zero-attention":
        return replace(Kernels(), paged_attention=_zero_attention)
    if fault == "swap-two-blocks":
        return replace(Kernels(), paged_attention=_with_tables(_swap_two_blocks))
    if fault == "skip-newest-slot":
        return replace(Kernels(), reshape_and_cache=_skip_newest_slot)
    if fault == "shift-table":
        return replace(Kernels(), paged_attention=_with_tables(_shift))
    raise InvalidRequestError(f"must be one of {', '.join(FAULTS)}", field="fault")


def _zero_attention(query: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
    return torch.zeros_like(query)


def _with_tables(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., Any]:
    def paged_attention(
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        return kernels.paged_attention(query, pages, change(block_tables), *args, **options)

    return paged_attention


def _swap_two_blocks(block_tables: torch.Tensor) -> torch.Tensor:
    """The first two blocks of every table change places."""
    swapped = block_tables.clone()
    swapped[:, :2] = block_tables[:, :2].flip(1)
    return swapped


def _shift(block_tables: torch.Tensor) -> torch.Tensor:
    """Every table is read from its second entry on."""
    return block_tables.roll(-1, dims=1)


def _skip_newest_slot(
    key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """The last slot of every run of slots, which a row's newest token is in, is not written."""
    ends_run = torch.ones_like(slots, dtype=torch.bool)
    ends_run[:-1] = slots[1:] != slots[:-1] + 1
    kernels.reshape_and_cache(key, value, pages, torch.where(ends_run, -1, slots))
