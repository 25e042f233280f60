"""A pool of latents over a real socket: one tensor in for each token, attention and blocks out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from control_plane.server.server import ControlPlaneServer
from data_plane.server.server import DataPlaneServer
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from kvplane import ControlClient
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.layout import LATENT, LayerGroup
from kvplane.tensor import Tensor
from tests.helpers.data.data_server import author_of, config_of, serving
from tests.helpers.data.plan_author import (
    LAYOUT,
    POOL_ID,
    PlanAuthor,
    dense_attention,
    set_blocks,
    span,
)
from tests.helpers.data.unary_client import UnaryClient
from tests.helpers.load import Load

NUM_TOKENS, NUM_HEADS, LATENT_SIZE, VALUE_SIZE = 12, 128, 576, 512
GROUP = LayerGroup("latent", (0, 1), 1, LATENT_SIZE, cache_kind=LATENT, value_head_size=VALUE_SIZE)
LATENTS = replace(LAYOUT, groups=(GROUP,))
OPTIONS = AttentionOptions(scale=192**-0.5)


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[tuple[PlanAuthor, UnaryClient]]:
    async with serving(tmp_path, layout=LATENTS) as (server, side):
        author = author_of(server, side)
        author.layout = LATENTS
        async with UnaryClient(server.address) as client:
            yield author, client


def random(num_heads: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_TOKENS, num_heads, LATENT_SIZE, generator=made)


def wire(tensor: torch.Tensor) -> Tensor:
    return Tensor.from_proto(tensor_to_message(tensor))


def received(tensor: Any) -> torch.Tensor:
    return tensor_from_message(tensor, torch.device("cpu"), field="tensor")


async def test_a_row_for_each_token_is_stored_attended_to_and_read(
    peer: tuple[PlanAuthor, UnaryClient],
) -> None:
    author, client = peer
    query, latent = random(NUM_HEADS, 0), random(1, 1)
    grant = author.grant()
    plan = author.plan(1, changes=[set_blocks(1, [(5, 1), (2, 1)])], spans=[span(1, 0, NUM_TOKENS)])
    async with await client.open(grant) as execution:
        await execution.start(plan)
        for layer in (0, 1):
            output = await execution.layer(layer, wire(query), wire(latent), None, options=OPTIONS)
        assert execution.has_run
    wanted = dense_attention(
        query * OPTIONS.scale * LATENT_SIZE**0.5, latent, latent[..., :VALUE_SIZE]
    )
    torch.testing.assert_close(received(output.to_proto()), wanted, atol=1e-5, rtol=1e-5)
    read = await client.read_blocks(grant, 1, num_blocks=2)
    blocks = received(read.blocks)
    rows = blocks.view(2, 2 * LAYOUT.block_size_tokens, LATENT_SIZE)[:, :NUM_TOKENS]
    assert torch.equal(rows, latent[:, 0].expand(2, -1, -1))


async def test_unary_calls_take_one_tensor_too(peer: tuple[PlanAuthor, UnaryClient]) -> None:
    author, client = peer
    query, latent = random(NUM_HEADS, 0), wire(random(1, 1))
    grant = author.grant()
    plan = author.plan(1, changes=[set_blocks(1, [(5, 1), (2, 1)])], spans=[span(1, 0, NUM_TOKENS)])
    for value, options, field in (
        (latent, OPTIONS, "value"),
        (None, AttentionOptions(), "options.scale"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            await client.reshape_and_cache(grant, plan, 0, latent, value)
            await client.paged_attention(grant, plan, 0, wire(query), options=options)
        assert caught.value.field == field
    answer = await client.paged_attention(grant, plan, 0, wire(query), options=OPTIONS)
    assert list(answer.output.shape) == [NUM_TOKENS, NUM_HEADS, VALUE_SIZE]


async def test_a_pool_with_a_group_of_them_serves_sessions_of_a_control_plane(
    tmp_path: Path, control_server: ControlPlaneServer
) -> None:
    full = LayerGroup("full", (2, 5), 2, 16, value_head_size=8)
    layout = replace(LAYOUT, groups=(replace(GROUP, layers=(0, 1, 3)), full))
    config = config_of(tmp_path, control_server.address, layout, num_device_blocks=64)
    data = await DataPlaneServer.start(config)
    async with ControlClient(control_server.address) as client:
        await client.wait_ready(POOL_ID, timeout_s=20)
        pool = await client.get_pool(POOL_ID)
        assert pool.layout == layout
        load = Load(duration_s=0.3)
        await load.run(client, POOL_ID)
        assert load.num_steps > 0 and load.num_lost_sessions == 0
    assert data.executor.counters.num_attention_tokens > 0
    await data.stop()
