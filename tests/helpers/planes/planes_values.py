"""Computes the right value of every slot of a pool, from its tokens alone.

A position's keys and values are a function of its owner and of all tokens up to it, so a block that
is not the sequence's own is a wrong value. The last element of each head says whose tenant wrote
it, so that another tenant's data is recognised where nothing was written since. The element before
it is a number of the plan that wrote it, which no value and no output depends on.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from data_plane import Executor
from kvplane.errors import BlockNotWrittenError
from kvplane.layout import LayerGroup, Layout

BLOCK, WINDOW = 8, 20
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 2, 2, 8
FULL = LayerGroup("full", tuple(range(NUM_LAYERS)), NUM_HEADS, HEAD_SIZE)
LAYOUT = Layout("model", BLOCK, "float32", "float32", (FULL,))
TWO_GROUPS = replace(
    LAYOUT,
    groups=(
        replace(FULL, layers=(0,)),
        replace(FULL, name="window", layers=(1,), sliding_window_tokens=WINDOW),
    ),
)
STATES = replace(
    FULL, name="states", head_size=0, cache_kind="state", page_bytes=NUM_HEADS * 2 * HEAD_SIZE * 4
)
HYBRID = replace(LAYOUT, groups=(FULL, STATES))
TENANTS = ("ann", "bob")

Owner = tuple[str, str]
"""Tenant and namespace."""
Values = NDArray[np.float32]

_NUM_KINDS = 4096
_KINDS = (
    np.random.default_rng(0)
    .uniform(-1, 1, (_NUM_KINDS, NUM_LAYERS, 2, NUM_HEADS, HEAD_SIZE))
    .astype(np.float32)
)


def tag_of(tenant: str) -> float:
    """Return the last element of each head that the tenant writes."""
    return 1.0 + TENANTS.index(tenant)


def values_of(owner: Owner, tokens: Sequence[int]) -> Values:
    """Return each position's keys and values, [num_tokens, NUM_LAYERS, 2, NUM_HEADS, HEAD_SIZE]."""
    value, chain = zlib.crc32("/".join(owner).encode()), []
    for token in tokens:
        value = hash((value, token))
        chain.append(value % _NUM_KINDS)
    values = _KINDS[chain]
    values[..., -2] = 0
    values[..., -1] = tag_of(owner[0])
    return values


class ShardView:
    """The part of the values that one executor holds."""

    def __init__(self, executor: Executor) -> None:
        shard = executor.shard
        self.layers = list(executor.layers)
        self.groups = executor.layout.attention_groups
        self.heads = slice(shard.first_kv_head, shard.first_kv_head + shard.num_kv_heads)

    def layer(self, values: Values, layer: int, kind: int) -> torch.Tensor:
        """Return keys (``kind`` 0) or values (1), [num_tokens, num_kv_heads, HEAD_SIZE]."""
        return torch.from_numpy(np.ascontiguousarray(values[:, layer, kind, self.heads]))

    def blocks(self, values: Values, group: int) -> Values:
        """Return a layer group's values as blocks, [num_layers, num_blocks, 2, num_kv_heads, BLOCK,
        HEAD_SIZE], with NaN in slots after the last.
        """
        num_blocks = -(-len(values) // BLOCK)
        layers = [layer for layer in self.layers if layer in self.groups[group].layers]
        own = values[:, layers][:, :, :, self.heads]
        own[..., -2] = np.nan
        padded = np.full((num_blocks * BLOCK, *own.shape[1:]), np.nan, np.float32)
        padded[: len(own)] = own
        by_block = padded.reshape(num_blocks, BLOCK, *own.shape[1:])
        return by_block.transpose(2, 0, 3, 4, 1, 5)

    def state(self, values: Values) -> torch.Tensor:
        """Return the state after the last position, [num_layers, 1, page_bytes], uint8: what that
        position's keys and values are a function of, a state is too.
        """
        own = values[-1, self.layers][:, :, self.heads].transpose(0, 2, 1, 3)
        pages = np.ascontiguousarray(own).view(np.uint8).reshape(len(self.layers), 1, -1)
        return torch.from_numpy(pages)

    def attention(self, values: Values, first: int, layer: int) -> Values:
        """Return the outputs of positions from ``first`` on, with queries of twice their values."""
        own = values[:, layer, :, self.heads].astype(np.float64)
        keys, vectors = own[:, 0], own[:, 1]
        scores = np.einsum("qhd,khd->hqk", 2 * vectors[first:], keys) / np.sqrt(HEAD_SIZE)
        positions = np.arange(len(values))
        distances = positions[first:, None] - positions[None, :]
        (window,) = (g.sliding_window_tokens for g in self.groups if layer in g.layers)
        scores[:, (distances < 0) | (distances >= (window or len(values)))] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, vectors).astype(np.float32)


def check_blocks(found: Values, wanted: Values, tag: float, where: str) -> None:
    """Check that slots hold the written values, and the others nothing of another tenant.
    ``wanted`` has NaN where anything of the own tenant may be.
    """
    assert found.shape == wanted.shape, where
    owners = found[..., -1]
    strangers = (owners != tag) & (owners != 0)
    assert not strangers.any(), f"{where}: another tenant's data"
    wrong = (found != wanted) & ~np.isnan(wanted)
    assert not wrong.any(), f"{where}: wrong at (layer, block, ...) {np.argwhere(wrong)[0]}"


def check_read(
    executor: Executor,
    of: tuple[int, int],
    wanted: Values,
    tag: float,
    where: str,
    *,
    group: int,
    num_unseen: int,
) -> None:
    """``check_blocks`` of a layer group's memory of a sequence, given by its session's id and its
    own, also of slots that it may not read; and it reads all that it has written, but for blocks
    that were trimmed. ``num_unseen``: leading blocks that may be, as no further token sees them.
    """
    num_layers, num_blocks = wanted.shape[:2]
    whole = executor._tables.get(*of, "", group)
    table = whole.part(0, num_blocks)
    assert whole.num_trimmed <= num_unseen, f"{where}: a block that a token sees was freed"
    held = executor._compute._gather(table.tier_key, table.blocks, range(num_layers))
    check_blocks(held.numpy(), wanted[:, whole.num_trimmed :], tag, where)
    for i in range(whole.num_trimmed, num_blocks):
        try:
            block, _ = executor.read_blocks(*of, [i], group=group)
        except BlockNotWrittenError:
            assert np.isnan(wanted[:, i]).all(), f"{where}: what was written is not read"
        else:
            check_blocks(block.numpy(), wanted[:, i : i + 1], tag, where)
