"""The scales of 8-bit keys and values, in the form that one shard's kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvplane.layout import LATENT, Layout
from kvplane.shard import Shard

LayerScales = tuple[torch.Tensor | None, torch.Tensor | None]
"""One layer's key scales and value scales."""


def layer_scales(layout: Layout, shard: Shard, device: torch.device) -> list[LayerScales]:
    """One pair for each layer of ``shard``, ascending: float32 [KV heads held of its group]
    on ``device``, or None where the layout has no scales, which means that all are 1.
    """
    of_layer: dict[int, LayerScales] = {}
    for i in range(len(layout.groups)):
        scales = _group_scales(layout, shard, i, device)
        of_layer |= zip(shard.group_layers(layout, i), scales, strict=True)
    return [of_layer[layer] for layer in shard.layers(layout)]


def _group_scales(
    layout: Layout, shard: Shard, index: int, device: torch.device
) -> list[LayerScales]:
    group, heads = layout.groups[index], shard.kv_heads(layout, index)
    held = [group.layers.index(layer) for layer in shard.group_layers(layout, index)]

    def of_held(scales: Sequence[float]) -> list[torch.Tensor | None]:
        if not scales:
            return [None] * len(held)
        # A layer with one scale has it for all its heads.
        of_all = torch.tensor(scales, dtype=torch.float32).view(len(group.layers), -1)
        of_heads = of_all.expand(-1, group.num_kv_heads)[held, heads.start : heads.stop]
        return list(of_heads.contiguous().to(device))

    is_latent = group.cache_kind == LATENT  # a value is a part of its key
    values = group.key_scales if is_latent else group.value_scales
    return list(zip(of_held(group.key_scales), of_held(values), strict=True))
