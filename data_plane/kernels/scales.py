"""The scales of 8-bit keys and values, in the form that one shard's kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvplane.layout import Layout
from kvplane.shard import Shard, only_group

LayerScales = tuple[torch.Tensor | None, torch.Tensor | None]
"""One layer's key scales and value scales."""


def layer_scales(layout: Layout, shard: Shard, device: torch.device) -> list[LayerScales]:
    """One pair for each layer of ``shard``, ascending: float32 [num_kv_heads of the shard] on
    ``device``, or None where the layout has no scales, which means that all are 1.
    """
    group = only_group(layout)
    held = [group.layers.index(layer) for layer in shard.layers(layout)]
    first, end = shard.first_kv_head, shard.first_kv_head + shard.num_kv_heads

    def of_held(scales: Sequence[float]) -> list[torch.Tensor | None]:
        if not scales:
            return [None] * len(held)
        # A layer with one scale has it for all its heads.
        of_all = torch.tensor(scales, dtype=torch.float32).view(len(group.layers), -1)
        of_heads = of_all.expand(-1, group.num_kv_heads)[held, first:end].contiguous()
        return list(of_heads.to(device))

    return list(zip(of_held(group.key_scales), of_held(group.value_scales), strict=True))
