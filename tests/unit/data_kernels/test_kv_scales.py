"""Each shard is given the scales of its own layers and heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data_plane.execution.shards.shard_kernels import layer_scales
from kvplane.layout import LayerGroup, Layout
from kvplane.shard import Shard
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import LAYOUT, set_blocks, span, tokens

CPU = torch.device("cpu")
HEADS = 4
# Layers 1, 3 and 4; a scale says in its digits whose it is.
PER_HEAD = tuple(10.0 * layer + head for layer in (1, 3, 4) for head in range(HEADS))
GROUP = LayerGroup("full", (1, 3, 4), HEADS, 16)


def layout(**scales: tuple[float, ...]) -> Layout:
    return Layout("m", 16, "float32", "float8_e4m3fn", (replace(GROUP, **scales),))


def numbers(scales: torch.Tensor | None) -> list[float]:
    assert scales is not None
    assert (scales.dtype, scales.device, scales.is_contiguous()) == (torch.float32, CPU, True)
    return scales.tolist()


def test_a_whole_pool_has_the_scales_of_all_heads() -> None:
    scaled = layout(key_scales=PER_HEAD, value_scales=(5.0, 6.0, 7.0))
    pairs = layer_scales(scaled, Shard.whole(scaled), CPU)
    assert [numbers(key) for key, _ in pairs] == [
        [10.0, 11.0, 12.0, 13.0],
        [30.0, 31.0, 32.0, 33.0],
        [40.0, 41.0, 42.0, 43.0],
    ]
    assert [numbers(value) for _, value in pairs] == [[5.0] * HEADS, [6.0] * HEADS, [7.0] * HEADS]


@pytest.mark.parametrize("first", [0, 2])
def test_a_shard_has_the_scales_of_its_own_heads(first: int) -> None:
    scaled = layout(key_scales=(5.0, 6.0, 7.0), value_scales=PER_HEAD)
    shard = Shard(first // 2, 2, 1, 4, first_kv_head=first, num_kv_heads=2)
    pairs = layer_scales(scaled, shard, CPU)
    assert [numbers(key) for key, _ in pairs] == [[5.0] * 2, [6.0] * 2, [7.0] * 2]
    assert [numbers(value) for _, value in pairs] == [
        [10.0 * layer + first, 10.0 * layer + first + 1] for layer in (1, 3, 4)
    ]


def test_a_shard_has_the_scales_of_its_own_layers() -> None:
    scaled = layout(key_scales=(5.0, 6.0, 7.0))
    pairs = layer_scales(scaled, Shard(1, 2, 2, 3, 0, HEADS), CPU)
    assert [(numbers(key), value) for key, value in pairs] == [
        ([6.0] * HEADS, None),
        ([7.0] * HEADS, None),
    ]


def test_without_scales_there_are_none() -> None:
    bare = layout()
    assert layer_scales(bare, Shard.whole(bare), CPU) == [(None, None)] * 3


def run(layout: Layout, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over 12 tokens in the last layer, and the blocks that hold them; of a shard's own
    heads.
    """
    rig = Rig(layout=layout, shard=shard)
    rig.start(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12))
    first, end = shard.first_kv_head, shard.first_kv_head + shard.num_kv_heads
    query = tokens(12, 4)[:, 2 * first : 2 * end]
    key, value = (tokens(12, seed=seed)[:, first:end] for seed in (1, 2))
    for layer in rig.executor.layers:
        output = rig.run_layer(layer, query, key, value)
    assert output is not None
    return output, rig.executor.read_blocks(1, 1, range(2))[0].view(torch.uint8)


def test_shards_compute_together_what_a_whole_pool_does() -> None:
    group = replace(LAYOUT.groups[0], key_scales=(0.5, 0.01, 0.02, 3.0), value_scales=(0.25, 0.1))
    scaled = replace(LAYOUT, kv_dtype="float8_e4m3fn", groups=(group,))
    output, blocks = run(scaled, Shard.whole(scaled))
    parts = [run(scaled, Shard(i, 2, 0, 2, first_kv_head=i, num_kv_heads=1)) for i in range(2)]
    assert torch.equal(torch.cat([part for part, _ in parts], dim=1), output)
    assert torch.equal(torch.cat([part for _, part in parts], dim=3), blocks)
