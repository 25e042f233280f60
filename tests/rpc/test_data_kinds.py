"""Pools of 8-bit keys and values and pools of latents, as their tensors travel. What is computed of
them is tested in ``tests/unit/executor``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_plane.memory.pool import TORCH_DTYPES
from kvplane import ControlClient, Tensor
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.layout import LATENT, LayerGroup
from tests.helpers.both_planes import POOL, Planes
from tests.helpers.data.plan_author import (
    HOST,
    LAYOUT,
    dense_attention,
    int32,
    int64,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)
from tests.helpers.load import Load
from tests.helpers.refusals import refused
from tests.helpers.served import Served, received, served

SCALED = replace(LAYOUT.groups[0], key_scales=(0.5, 0.01), value_scales=(1.0, 0.25, 0.02, 3.0))
NUM_TOKENS, NUM_HEADS, LATENT_SIZE, VALUE_SIZE = 12, 128, 576, 512
LATENTS = LayerGroup(
    "latent", (0, 1), 1, LATENT_SIZE, cache_kind=LATENT, value_head_size=VALUE_SIZE
)
OPTIONS = AttentionOptions(scale=192**-0.5)


@pytest.fixture(params=["float8_e4m3fn", "float8_e5m2"])
async def small(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    layout = replace(LAYOUT, kv_dtype=request.param, groups=(SCALED,))
    async with served(tmp_path, layout=layout) as peer:
        yield peer


async def test_stored_bytes_are_written_and_read_bit_for_bit(small: Served) -> None:
    """Every pattern of 8 bits, NaN and infinities with it; scales change none."""
    author = small.author
    shape = (2, 3, 2, 2, 8, 16)
    generator = torch.Generator().manual_seed(3)
    octets = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    assert octets.unique().numel() == 256
    kv_dtype = small.executor.layout.kv_dtype
    changes = [set_blocks(1, [(5, 1), (2, 1), (7, 1)])]
    written = await small.ask(
        "WriteBlocks",
        plan=author.plan(1, changes=changes, spans=[span(1, 0, 20)]),
        sequence_ids=int64(1, 1, 1),
        entries=int32(0, 1, 2),
        blocks=Tensor(kv_dtype, shape, octets.numpy().tobytes()),
    )
    assert author.read_receipt(written.receipt).plan_number == 1
    out = author.plan(
        2,
        changes=[set_blocks(1, [(0, 1), (3, 1), (1, 1)], tier=HOST, replace=True)],
        transfers=[transfer(ref(b), ref(h, 1, HOST)) for b, h in ((5, 0), (2, 3), (7, 1))],
    )
    for plan in (None, out):
        if plan is not None:
            await small.ask("SwapBlocks", plan=plan)
        answer = await small.ask("ReadBlocks", sequence_id=1, entries=int32(0, 1, 2))
        read = Tensor.from_proto(answer.blocks)
        assert (read.dtype, read.shape) == (kv_dtype, shape)
        got = read.torch().view(torch.uint8)
        assert torch.equal(got[:, :2], octets[:, :2])
        assert torch.equal(got[:, 2, :, :, :4], octets[:, 2, :, :, :4])
        assert not got[:, 2, :, :, 4:].any()  # beyond the span


async def test_8_bits_are_no_type_of_keys_and_values_that_arrive(small: Served) -> None:
    plan = small.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 4)])
    key = tokens(4).to(TORCH_DTYPES[small.executor.layout.kv_dtype])
    with refused(InvalidRequestError, "key"):
        await small.ask("ReshapeAndCache", plan=plan, key=key, value=key)


def random(num_heads: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_TOKENS, num_heads, LATENT_SIZE, generator=made)


async def test_one_tensor_of_latents_comes_for_each_token(tmp_path: Path) -> None:
    """In streams and in unary calls."""
    query, latent = random(NUM_HEADS, 0), random(1, 1)
    async with served(tmp_path, layout=replace(LAYOUT, groups=(LATENTS,))) as peer:
        changes = [set_blocks(1, [(5, 1), (2, 1)])]
        plan = peer.author.plan(1, changes=changes, spans=[span(1, 0, NUM_TOKENS)])
        with refused(InvalidRequestError, "value"):
            await peer.ask("ReshapeAndCache", plan=plan, key=latent, value=latent)
        await peer.ask("ReshapeAndCache", plan=plan, key=latent)
        with refused(InvalidRequestError, "options.scale"):
            await peer.ask("PagedAttention", plan=plan, query=query)
        answer = await peer.ask("PagedAttention", plan=plan, query=query, options=OPTIONS)
        wanted = dense_attention(
            query * OPTIONS.scale * LATENT_SIZE**0.5, latent, latent[..., :VALUE_SIZE]
        )
        torch.testing.assert_close(received(answer.output), wanted, atol=1e-5, rtol=1e-5)
        rows = Tensor.from_array(query), Tensor.from_array(latent), None
        async with peer.client() as client, await client.open(peer.author.grant()) as execution:
            await execution.start(plan)
            for layer in (0, 1):
                output = await execution.layer(layer, *rows, options=OPTIONS)
            assert execution.has_run
        assert output == Tensor.from_proto(answer.output)
        answer = await peer.ask("ReadBlocks", sequence_id=1, entries=int32(0, 1))
        stored = received(answer.blocks).view(2, -1, LATENT_SIZE)[:, :NUM_TOKENS]
        assert torch.equal(stored, latent[:, 0].expand(2, -1, -1))


async def test_a_pool_with_a_group_of_latents_serves_sessions_of_a_control_plane(
    tmp_path: Path,
) -> None:
    full = LayerGroup("full", (2, 5), 2, 16, value_head_size=8)
    layout = replace(LAYOUT, groups=(replace(LATENTS, layers=(0, 1, 3)), full))
    async with (
        Planes(tmp_path, layout, data={"num_device_blocks": 64}) as planes,
        ControlClient(planes.address) as client,
    ):
        assert (await client.wait_ready(POOL, timeout_s=20)).layout == layout
        load = Load(duration_s=0.3)
        await load.run(client, POOL)
        assert load.num_steps > 0
        assert planes.data.executor.counters.num_attention_tokens > 0
