"""A pool of 8-bit keys and values over a real socket: numbers in, stored bytes out and in again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_plane.memory.pool import TORCH_DTYPES
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout
from kvplane.tensor import Tensor
from tests.helpers.data.data_server import author_of, serving
from tests.helpers.data.plan_author import (
    HOST,
    LAYOUT,
    PlanAuthor,
    dense_attention,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)
from tests.helpers.data.unary_client import UnaryClient

CPU = torch.device("cpu")
# Of layer 1, the keys' scale is for both heads; the values' scales are one a layer and head.
KEY_SCALES, VALUE_SCALES = (0.5, 0.01), (1.0, 0.25, 0.02, 3.0)
GROUP = replace(LAYOUT.groups[0], key_scales=KEY_SCALES, value_scales=VALUE_SCALES)
NUM_LAYERS, NUM_HEADS = 2, 2


class Peer:
    """A registered data plane, its plan author and a client."""

    def __init__(self, layout: Layout, author: PlanAuthor, client: UnaryClient) -> None:
        self.layout, self.author, self.client = layout, author, client
        self.dtype = TORCH_DTYPES[layout.kv_dtype]


@pytest.fixture(params=[("float8_e4m3fn", True), ("float8_e5m2", False)])
async def peer(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Peer]:
    kv_dtype, shared_memory = request.param
    layout = replace(LAYOUT, kv_dtype=kv_dtype, groups=(GROUP,))
    async with serving(tmp_path, layout=layout) as (server, side):
        author = author_of(server, side)
        author.layout = layout
        async with UnaryClient(server.address, shared_memory=shared_memory) as client:
            yield Peer(layout, author, client)


def wire(tensor: torch.Tensor) -> Tensor:
    return Tensor.from_proto(tensor_to_message(tensor))


def stored(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[num_tokens, num_kv_heads, head_size] as a pool holds them."""
    largest = torch.finfo(dtype).max
    return (numbers / scales[:, None]).clamp(-largest, largest).to(dtype)


def scales_of(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = layer * NUM_HEADS
    return (
        torch.full((NUM_HEADS,), KEY_SCALES[layer]),
        torch.tensor(VALUE_SCALES[first : first + NUM_HEADS]),
    )


async def test_keys_and_values_are_stored_by_their_scales_and_attended_to(peer: Peer) -> None:
    query, key, value = tokens(12, 4), tokens(12, seed=1), tokens(12, seed=2) * 9
    grant = peer.author.grant()
    async with await peer.client.open(grant) as execution:
        changes = [set_blocks(1, [(5, 1), (2, 1)])]
        await execution.start(peer.author.plan(1, changes=changes, spans=[span(1, 0, 12)]))
        outputs = [await execution.layer(i, wire(query), wire(key), wire(value)) for i in (0, 1)]
    read = await peer.client.read_blocks(grant, 1, num_blocks=2)
    blocks = tensor_from_message(read.blocks, CPU, field="blocks")
    assert (blocks.dtype, blocks.shape) == (peer.dtype, (NUM_LAYERS, 2, 2, NUM_HEADS, 8, 16))
    for layer, output in enumerate(outputs):
        # [num_blocks, 2, heads, block_size, head_size] -> [2, tokens, heads, head_size]
        bits = blocks[layer].view(torch.uint8).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :12]
        meant = []
        for numbers, scales, got in zip((key, value), scales_of(layer), bits, strict=True):
            want = stored(numbers, scales, peer.dtype)
            assert torch.equal(got, want.view(torch.uint8))
            meant.append(want.float() * scales[:, None])
        assert output is not None
        assert output.dtype == "float32"
        got = tensor_from_message(output.to_proto(), CPU, field="output")
        torch.testing.assert_close(got, dense_attention(query, *meant), atol=1e-4, rtol=1e-5)


async def test_stored_bytes_are_written_and_read_bit_for_bit(peer: Peer) -> None:
    """Every pattern of 8 bits, NaN and infinities with it; scales change none."""
    author, client = peer.author, peer.client
    grant = author.grant()
    shape = (NUM_LAYERS, 3, 2, NUM_HEADS, 8, 16)
    generator = torch.Generator().manual_seed(3)
    octets = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    assert octets.unique().numel() == 256
    blocks = Tensor(peer.layout.kv_dtype, shape, octets.numpy().tobytes())
    changes = [set_blocks(1, [(5, 1), (2, 1), (7, 1)])]
    write = author.plan(1, changes=changes, spans=[span(1, 0, 20)])
    written = await client.write_blocks(grant, write, 1, blocks)
    assert author.read_receipt(written.receipt).plan_number == 1
    out = author.plan(
        2,
        changes=[set_blocks(1, [(0, 1), (3, 1), (1, 1)], tier=HOST, replace=True)],
        transfers=[transfer(ref(b), ref(h, 1, HOST)) for b, h in ((5, 0), (2, 3), (7, 1))],
    )
    for plan in (None, out):
        if plan is not None:
            await client.swap_blocks(grant, plan)
        read = Tensor.from_proto((await client.read_blocks(grant, 1, num_blocks=3)).blocks)
        assert (read.dtype, read.shape) == (peer.layout.kv_dtype, shape)
        got = torch.frombuffer(bytearray(read.data), dtype=torch.uint8).view(shape)
        assert torch.equal(got[:, :2], octets[:, :2])
        assert torch.equal(got[:, 2, :, :, :4], octets[:, 2, :, :, :4])
        assert not got[:, 2, :, :, 4:].any()  # beyond the span


async def test_8_bits_are_no_type_of_keys_and_values_that_arrive(peer: Peer) -> None:
    plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 4)])
    key = wire(tokens(4).to(peer.dtype))
    with pytest.raises(InvalidRequestError) as caught:
        await peer.client.reshape_and_cache(peer.author.grant(), plan, 0, key, key)
    assert caught.value.field == "key"
