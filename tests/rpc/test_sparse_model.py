"""A tiny model with the attention of Phi-3-small and random weights: every second layer is dense,
the others are block-sparse, in a pattern that moves from query head to query head. Served by a
pool, whole or in two shards, it gives the tokens of a plain computation, with hits and without.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from kvplane import ControlClient, Execution, LayerGroup, Layout, Session, Tensor, ops
from kvplane.attention_options import AttentionOptions
from kvplane.block_pattern import BlockPattern
from tests.helpers.sharded_pool import POOL, ShardedPool, by_heads

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, HIDDEN, VOCABULARY = 4, 8, 2, 16, 64, 97
BLOCK_TOKENS, LOCAL_BLOCKS, STRIDE, STEP = 16, 2, 4, 1
SPARSE_LAYERS, DENSE_LAYERS = (0, 2), (1, 3)
PATTERN: Final = BlockPattern(BLOCK_TOKENS, LOCAL_BLOCKS, STRIDE, STEP)
LAYOUT: Final = Layout(
    "tiny-phi3small",
    16,
    "float32",
    "float32",
    (
        LayerGroup("sparse", SPARSE_LAYERS, NUM_KV_HEADS, HEAD_SIZE, block_pattern=PATTERN),
        LayerGroup("dense", DENSE_LAYERS, NUM_KV_HEADS, HEAD_SIZE),
    ),
)
PROMPT: Final = torch.randint(VOCABULARY, (200,), generator=torch.Generator().manual_seed(5))
NUM_GENERATED = 12

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], Awaitable[torch.Tensor]]
"""Attention of a layer, its query, key and value, all [num_tokens, heads, HEAD_SIZE]."""


class Model:
    """Decoder layers with rotary positions and a small MLP."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(11)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made) * 2 / math.sqrt(shape[-2])

        sizes = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        self.embedding = weights(VOCABULARY, HIDDEN) * VOCABULARY**0.5
        self.projections = [
            [weights(HIDDEN, num * HEAD_SIZE) for num in sizes] for _ in range(NUM_LAYERS)
        ]
        self.outputs = [weights(NUM_HEADS * HEAD_SIZE, HIDDEN) for _ in range(NUM_LAYERS)]
        self.mlps = [(weights(HIDDEN, 96), weights(96, HIDDEN)) for _ in range(NUM_LAYERS)]

    async def next_token(self, ids: Sequence[int], first: int, attend: Attend) -> int:
        """The greedy token after ``ids``, which are at positions from ``first`` on."""
        hidden = self.embedding[torch.tensor(ids)]
        positions = torch.arange(first, first + len(ids))
        for layer in range(NUM_LAYERS):
            rows = (norm(hidden) @ w for w in self.projections[layer])
            query, key, value = (row.view(len(ids), -1, HEAD_SIZE) for row in rows)
            query, key = rotated(query, positions), rotated(key, positions)
            attended = await attend(layer, query.contiguous(), key.contiguous(), value.contiguous())
            hidden = hidden + attended.reshape(len(ids), -1) @ self.outputs[layer]
            up, down = self.mlps[layer]
            hidden = hidden + torch.nn.functional.gelu(norm(hidden) @ up) @ down
        return int((norm(hidden[-1]) @ self.embedding.T).argmax())


MODEL: Final = Model()


def norm(rows: torch.Tensor) -> torch.Tensor:
    return rows * rows.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()


def rotated(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = HEAD_SIZE // 2
    angles = positions[:, None, None] * 1000 ** (-torch.arange(half) / half)
    left, right = rows[..., :half], rows[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def sees(head: int, query: int, key: int) -> bool:
    """As vLLM's kernel for decoding says it."""
    block_of_query, block = query // BLOCK_TOKENS, key // BLOCK_TOKENS
    is_remote = (block + head * STEP + 1) % STRIDE == 0
    is_local = block > block_of_query - LOCAL_BLOCKS
    return key <= query and (is_remote or is_local)


def mask(is_sparse: bool, num_tokens: int) -> torch.Tensor:
    """Whether each head's query sees each key: [NUM_HEADS, num_tokens, num_tokens]."""
    if not is_sparse:
        return torch.ones(NUM_HEADS, num_tokens, num_tokens, dtype=torch.bool).tril()
    tokens = range(num_tokens)
    return torch.tensor(
        [[[sees(h, q, k) for k in tokens] for q in tokens] for h in range(NUM_HEADS)]
    )


async def reference(prompt: Sequence[int]) -> list[int]:
    """The tokens after a prompt, each computed from the whole sequence before it."""
    most = len(prompt) + NUM_GENERATED
    masks = {is_sparse: mask(is_sparse, most) for is_sparse in (True, False)}

    async def attend(layer: int, *rows: torch.Tensor) -> torch.Tensor:
        query, key, value = (row.double().transpose(0, 1) for row in rows)
        key, value = (t.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 0) for t in (key, value))
        seen = masks[layer in SPARSE_LAYERS][:, : query.shape[1], : query.shape[1]]
        scores = (query @ key.transpose(1, 2) / HEAD_SIZE**0.5).masked_fill(~seen, -math.inf)
        return (scores.softmax(-1) @ value).transpose(0, 1).float()

    ids = list(prompt)
    for _ in range(NUM_GENERATED):
        ids.append(await MODEL.next_token(ids, 0, attend))
    return ids[len(prompt) :]


async def served(
    session: Session, execution: Execution, sequence_id: int, prompt: Sequence[int], **options: Any
) -> tuple[list[int], int]:
    """The tokens after a prompt, and of how many of its tokens keys and values were found."""

    async def attend(layer: int, *rows: torch.Tensor) -> torch.Tensor:
        given = (Tensor.from_array(row) for row in rows)
        output: torch.Tensor = (await execution.layer(layer, *given, **options)).torch()
        return output

    ids, num_found = list(prompt), -1
    operation: Any = ops.admit(sequence_id, ids)
    for _ in range(NUM_GENERATED):
        plan = (await session.step([operation])).plan
        assert plan is not None
        await execution.start(plan)
        first = len(ids) - execution.num_tokens
        num_found = first if num_found < 0 else num_found
        ids.append(await MODEL.next_token(ids[first:], first, attend))
        operation = ops.append(sequence_id, ids[-1:], 1, first_positions=len(ids) - 1)
    return ids[len(prompt) :], num_found


@pytest.mark.parametrize("num_shards", (1, 2))
async def test_a_sparse_model_gives_the_references_tokens(tmp_path: Path, num_shards: int) -> None:
    first = PROMPT.tolist()
    second = [*first[:128], *reversed(first[128:])]
    async with (
        ShardedPool(tmp_path, by_heads(num_shards), LAYOUT, data={"num_device_blocks": 64}) as pool,
        ControlClient(pool.address) as control,
        control.open_session(POOL, LAYOUT) as session,
        session.open_execution() as execution,
    ):
        assert await served(session, execution, 1, first) == (await reference(first), 0)
        assert await served(session, execution, 2, second) == (await reference(second), 128)
        # Whoever attends to all blocks computes another text.
        dense = AttentionOptions(block_pattern=BlockPattern(BLOCK_TOKENS, 1 << 20))
        tokens, _ = await served(session, execution, 3, first, options=dense)
        assert tokens != await reference(first)
