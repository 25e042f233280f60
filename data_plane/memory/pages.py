"""Pages: the keys and values of one layer, wherever they lie in a pool.

Kernels take them as one tensor ``[num_blocks, 2, num_kv_heads, block_size, head_size]``, K before
V, or as two: keys ``[num_blocks, num_kv_heads, block_size, head_size]`` and values ``[num_blocks,
num_kv_heads, block_size, value_head_size]`` of the same memory, where values are smaller than keys.
Such a page has one dimension in its pool: keys, and then values. A page of latents, which has one
dimension too, holds keys alone: values are views of their first elements. Kernels never take an
opaque page, or one of a state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvplane.errors import InvalidRequestError
from kvplane.layout import OPAQUE, STATE, LayerGroup

Pages = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PageShape:
    """The shape of a page: a layer's ``num_kv_heads`` of a block of ``block_size_tokens``."""

    group: LayerGroup
    num_kv_heads: int
    block_size_tokens: int

    @property
    def extents(self) -> tuple[int, ...]:
        """The dimensions of a page, which are the last ones of a pool."""
        return self.group.page_shape(self.num_kv_heads, self.block_size_tokens)

    @property
    def is_opaque(self) -> bool:
        """Return whether pages are bytes that only callers understand."""
        return self.group.cache_kind in (OPAQUE, STATE)

    def clear_slots(self, pages: torch.Tensor, block: int, num_kept: int) -> None:
        """Zero the slots of a block after its first ``num_kept``. An opaque page has no slots: all
        of it is zeroed. ``pages``: [num_layers, num_blocks, ...].
        """
        if self.is_opaque:
            pages[:, block] = 0
            return
        for part in self.stored(pages):
            part[:, block, :, num_kept:] = 0

    def keys_and_values(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values in ``pages``, as views [..., num_kv_heads, block_size,
        size]. Raises InvalidRequestError for opaque pages.
        """
        if self.is_opaque:
            raise InvalidRequestError(
                "keeps opaque pages: read and write its blocks with BlockService", field="layer"
            )
        stored = self.stored(pages)
        return stored[0], stored[-1][..., : self.group.value_size]

    def stored(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of the stored tensors, which do not overlap: keys and values, or latents."""
        if len(self.extents) > 1:
            return pages.unbind(-4)
        sizes = self.group.stored_sizes
        heads = [(self.num_kv_heads, self.block_size_tokens, size) for size in sizes]
        parts = torch.split(pages, [math.prod(shape) for shape in heads], dim=-1)
        return tuple(
            part.view(*pages.shape[:-1], *shape) for part, shape in zip(parts, heads, strict=True)
        )
