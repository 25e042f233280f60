"""Pools of latents, as their tensors travel. What is computed of them is tested in
``tests/unit/executor``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from kvplane import Tensor
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.layout import LATENT, LayerGroup
from tests.helpers.data.plan_author import (
    LAYOUT,
    dense_attention,
    int32,
    set_blocks,
    span,
)
from tests.helpers.refusals import refused
from tests.helpers.served import received, served

NUM_TOKENS, NUM_HEADS, LATENT_SIZE, VALUE_SIZE = 12, 6, 24, 16
LATENTS = LayerGroup(
    "latent", (0, 1), 1, LATENT_SIZE, cache_kind=LATENT, value_head_size=VALUE_SIZE
)
OPTIONS = AttentionOptions(scale=192**-0.5)


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
