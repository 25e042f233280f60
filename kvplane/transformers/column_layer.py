"""What transformers sees of a PlaneCache's layers: a number of columns, and no keys and values."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


class Extent:
    """How many columns the model has seen."""

    num_columns = 0


class ColumnLayer(CacheLayerMixin):
    """A layer as transformers sees it: a number of columns. One stands for all layers."""

    is_croppable = True

    def __init__(self, extent: Extent) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._extent = extent
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to allocate."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``PlaneCache.update``."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns, from the first on."""
        return self._extent.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns so far."""
        return self._extent.num_columns

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1
