"""A pool whose values are smaller than its keys: bytes, writes, swaps, blocks out and in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data_plane.memory.pages import PageShape
from kvplane.errors import InvalidRequestError
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import (
    DEVICE,
    HOST,
    LAYOUT,
    dense_attention,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)
from tests.helpers.refusals import refused

NUM_TOKENS, BLOCK_SIZE, NUM_HEADS, KEY_SIZE, VALUE_SIZE = 12, 8, 2, 16, 8
GROUP = replace(LAYOUT.groups[0], value_head_size=VALUE_SIZE)
PAGE_ELEMENTS = NUM_HEADS * BLOCK_SIZE * (KEY_SIZE + VALUE_SIZE)


@pytest.fixture(params=["float32", "bfloat16", "float8_e4m3fn"])
def rig(request: pytest.FixtureRequest) -> Rig:
    scales = {"key_scales": (0.5, 0.25), "value_scales": (0.125, 2.0)}
    group = replace(GROUP, **scales) if request.param.startswith("float8") else GROUP
    return Rig(layout=replace(LAYOUT, kv_dtype=request.param, groups=(group,)))


def admit(rig: Rig) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Runs 12 tokens on blocks 5 and 2. Returns keys, values and both layers' outputs."""
    changes = [set_blocks(1, [(5, 1), (2, 1)])]
    rig.start(1, changes=changes, spans=[span(1, 0, NUM_TOKENS)])
    query, key = tokens(NUM_TOKENS, 4), tokens(NUM_TOKENS, seed=1)
    value = tokens(NUM_TOKENS, seed=2)[..., :VALUE_SIZE]
    outputs = [rig.run_layer(layer, query, key, value) for layer in (0, 1)]
    assert all(out is not None for out in outputs)
    return key, value, [out for out in outputs if out is not None]


def test_a_block_has_the_bytes_of_its_keys_and_values(rig: Rig) -> None:
    layout, pools = rig.executor.layout, rig.executor.pools
    assert pools.device_tier.shape == (8, 2, PAGE_ELEMENTS)
    assert pools.device_tier[0].nbytes == layout.block_bytes()
    assert pools.host_tier[0].nbytes == layout.block_bytes()


def test_a_query_attends_to_them(rig: Rig) -> None:
    key, value, outputs = admit(rig)
    exact = rig.executor.layout.kv_dtype == "float32"
    for out in outputs:
        wanted = dense_attention(tokens(NUM_TOKENS, 4), key, value)
        assert out.shape == (NUM_TOKENS, 4, VALUE_SIZE)
        torch.testing.assert_close(out, wanted, atol=1e-5 if exact else 0.25, rtol=1e-5)


def test_keys_come_before_values_in_a_page(rig: Rig) -> None:
    key, value, _ = admit(rig)
    blocks, _ = rig.executor.read_blocks(1, 1, range(2))
    assert blocks.shape == (2, 2, PAGE_ELEMENTS)
    num_of_keys = NUM_HEADS * BLOCK_SIZE * KEY_SIZE
    for layer, (key_scale, value_scale) in enumerate(((0.5, 0.125), (0.25, 2.0))):
        for at, size, given, scale in (
            (slice(num_of_keys), KEY_SIZE, key, key_scale),
            (slice(num_of_keys, None), VALUE_SIZE, value, value_scale),
        ):
            pages = blocks[layer, :, at].unflatten(-1, (NUM_HEADS, BLOCK_SIZE, size))
            stored = pages.transpose(1, 2).flatten(0, 1)[:NUM_TOKENS]
            scale = scale if blocks.element_size() == 1 else 1.0
            wanted = (given / scale).to(blocks.dtype)
            assert torch.equal(stored.float(), wanted.float())


def test_blocks_move_and_come_back_bit_for_bit(rig: Rig) -> None:
    _, _, outputs = admit(rig)
    before, _ = rig.executor.read_blocks(1, 1, range(2))
    out = [transfer(ref(5), ref(0, 1, HOST)), transfer(ref(2), ref(3, 1, HOST))]
    rig.run(2, changes=[set_blocks(1, [(0, 1), (3, 1)], tier=HOST, replace=True)], transfers=out)
    host, _ = rig.executor.read_blocks(1, 1, range(2))
    assert torch.equal(host.view(torch.uint8), before.view(torch.uint8))
    back = [transfer(ref(0, 1, HOST), ref(1)), transfer(ref(3, 1, HOST), ref(6))]
    rig.run(3, changes=[set_blocks(1, [(1, 1), (6, 1)], tier=DEVICE, replace=True)], transfers=back)
    rig.start(4, changes=[set_blocks(2, [(3, 1), (4, 1)])], spans=[span(2, 0, NUM_TOKENS)])
    assert rig.executor.write_blocks(1, 2, 0, before) is not None
    copied, _ = rig.executor.read_blocks(1, 2, range(2))
    for got, want in zip(heads(copied), heads(before), strict=True):
        assert torch.equal(got[..., :NUM_TOKENS, :].float(), want[..., :NUM_TOKENS, :].float())
    for layer, wanted in enumerate(outputs):
        query, named = tokens(NUM_TOKENS, 4), of_latest(rig.executor)
        output = rig.executor.layer(1, layer, query, None, None, **named)
        assert output is not None
        assert torch.equal(output, wanted)


def heads(blocks: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values of all layers, [num_layers, heads, tokens, elements]."""
    views = PageShape(GROUP, NUM_HEADS, BLOCK_SIZE).keys_and_values(blocks)
    return [view.transpose(1, 2).flatten(2, 3) for view in views]


@pytest.mark.parametrize("size", [KEY_SIZE, 4])
def test_a_value_of_another_size_is_refused_before_it_is_written(rig: Rig, size: int) -> None:
    rig.start(1, changes=[set_blocks(1, [(5, 1), (2, 1)])], spans=[span(1, 0, 2)])
    before = rig.executor.pools.device_tier.clone()
    with refused(InvalidRequestError, "value", match=r"must be \[2, 2, 8\]"):
        rig.run_layer(0, tokens(2, 4), tokens(2), tokens(2)[..., :size])
    assert torch.equal(rig.executor.pools.device_tier.view(torch.uint8), before.view(torch.uint8))
