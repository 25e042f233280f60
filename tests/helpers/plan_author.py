"""The control plane's side of a data plane, for tests: grants and plans, signed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvplane import signing
from kvplane.layout import LayerGroup, Layout
from kvplane.v1 import types_pb2 as pb

DEVICE, HOST = pb.TIER_DEVICE, pb.TIER_HOST
POOL_ID = "pool"
BLOCK_SIZE = 8

LAYOUT = Layout(
    model_id="test-model",
    block_size_tokens=BLOCK_SIZE,
    dtype="float32",
    kv_dtype="float32",
    groups=(LayerGroup("full", (0, 1), num_kv_heads=2, head_size=16),),
)


@dataclass(slots=True)
class PlanAuthor:
    """Signs for one data plane. Every field of what it makes can be overridden by name."""

    epoch: int
    incarnation: int = 1
    key: bytes = field(default_factory=signing.new_key)
    layout: Layout = LAYOUT

    def sign(self, tag: str, payload: bytes) -> pb.SignedPayload:
        signature = signing.sign(self.key, tag, payload)
        return pb.SignedPayload(type=tag, payload=payload, signature=signature)

    def grant(self, session_id: int = 1, **fields: Any) -> pb.SignedPayload:
        values: dict[str, Any] = {
            "pool_id": POOL_ID,
            "shard_epochs": [self.epoch],
            "incarnation": self.incarnation,
            "session_id": session_id,
            "tenant": "default",
            "layout_fingerprint": self.layout.fingerprint,
            "max_plans_in_flight": 2,
        }
        grant = pb.SessionGrant(**{**values, **fields})
        return self.sign(signing.GRANT, grant.SerializeToString())

    def plan(self, number: int, session_id: int = 1, **fields: Any) -> pb.SignedPayload:
        """Follows plan ``number - 1`` unless ``previous`` is given."""
        values: dict[str, Any] = {
            "pool_id": POOL_ID,
            "shard_epochs": [self.epoch],
            "incarnation": self.incarnation,
            "session_id": session_id,
            "number": number,
            "previous": number - 1,
        }
        plan = pb.Plan(**{**values, **fields})
        return self.sign(signing.PLAN, plan.SerializeToString())

    def read_receipt(self, signed: pb.SignedPayload | None) -> pb.Receipt:
        """The receipt, its signature checked."""
        assert signed is not None, "there is no receipt"
        signing.verify(
            self.key,
            signing.RECEIPT,
            signed.type,
            signed.payload,
            signed.signature,
            field="receipt",
        )
        return pb.Receipt.FromString(signed.payload)


def set_blocks(
    sequence_id: int,
    blocks: Sequence[tuple[int, int]],
    *,
    fresh: bool | Sequence[bool] = True,
    first_block: int = 0,
    tier: pb.Tier = DEVICE,
    replace: bool = False,
) -> pb.TableChange:
    """``blocks``: (index, generation) pairs."""
    flags = [fresh] * len(blocks) if isinstance(fresh, bool) else list(fresh)
    change = pb.SetBlocks(
        first_block=first_block,
        blocks=pb.Blocks(
            tier=tier,
            indices=[index for index, _ in blocks],
            generations=[generation for _, generation in blocks],
        ),
        fresh=flags,
        replace=replace,
    )
    return pb.TableChange(sequence_id=sequence_id, set=change)


def fork(sequence_id: int, parent: int, num_blocks: int) -> pb.TableChange:
    change = pb.ForkTable(parent_sequence_id=parent, num_blocks=num_blocks)
    return pb.TableChange(sequence_id=sequence_id, fork=change)


def drop(sequence_id: int) -> pb.TableChange:
    return pb.TableChange(sequence_id=sequence_id, drop=pb.DropTable())


def ref(index: int, generation: int = 1, tier: pb.Tier = DEVICE) -> pb.BlockRef:
    return pb.BlockRef(tier=tier, index=index, generation=generation)


def transfer(source: pb.BlockRef, destination: pb.BlockRef) -> pb.Transfer:
    return pb.Transfer(source=source, destination=destination)


def row(sequence_id: int, first_position: int, num_tokens: int) -> pb.Row:
    return pb.Row(sequence_id=sequence_id, first_position=first_position, num_tokens=num_tokens)


def publication(index: int, generation: int = 1) -> pb.Publication:
    return pb.Publication(
        block=ref(index, generation),
        tenant="default",
        hash=bytes([index]) * 16,
        token_ids=bytes(4 * BLOCK_SIZE),
    )


def tokens(num_tokens: int, num_heads: int = 2, *, seed: int = 0) -> torch.Tensor:
    """[num_tokens, num_heads, 16] float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_heads, 16, generator=generator)


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64 of the last queries of a sequence over all of it.

    query [Q, H, D], key and value [T, Hkv, D]. Returns [Q, H, D].
    """
    group = query.shape[1] // key.shape[1]
    q = query.double()
    k = key.double().repeat_interleave(group, dim=1)
    v = value.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,thd->hqt", q, k) / query.shape[2] ** 0.5
    first = key.shape[0] - query.shape[0]
    visible = torch.arange(key.shape[0]) <= first + torch.arange(query.shape[0])[:, None]
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights, v).to(query.dtype)
