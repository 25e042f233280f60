"""Cache layers without keys and values: transformers sees a number of columns."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


class Extent:
    """The number of columns that the model has seen so far."""

    num_columns = 0


class ColumnLayer(CacheLayerMixin):
    """A cache layer as transformers sees it: a number of columns, the same for all layers."""

    is_croppable = True

    def __init__(self, extent: Extent) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._extent = extent
        self.is_initialized = True
        self.keys = self.values = torch.empty(0)  # Mllama asks how many it has

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because there is nothing to allocate."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values as they are: see ``PlaneCache.update``."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of all columns, and the first one's index, 0."""
        return self._extent.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of columns so far."""
        return self._extent.num_columns

    def get_max_length(self) -> int:
        """Return -1, which means that the layer itself has no limit."""
        return -1
