"""Plans and publications as the model data plane reads them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from control_plane.sessions.session import Session
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.native.native_pool import Ref, Span, decoded
from tests.helpers.planning.registration_messages import LAYOUT, Prefix, signed

BLOCK = LAYOUT.block_size_tokens
DEVICE, HOST = tpb.TIER_DEVICE, tpb.TIER_HOST
TIERS = (DEVICE, HOST)
POOL = "pool"

BlockId = tuple[int, int]
"""Tier and index."""


def pack(tokens: Sequence[int]) -> bytes:
    """Return token ids as a column."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def receipt_of(session: Session, number: int) -> tpb.SignedPayload:
    """Return the receipt of a session's plan in flight, of the pool's only shard."""
    payload = plan_pb2.Receipt(
        version=session.payload_version,
        session=session.ref,
        pool_id=session.pool.id,
        epoch=session.epochs[0],
        plan_number=number,
        plan_digest=session.plans[number].digest,
    ).SerializeToString(deterministic=True)
    return signed(session.pool.key, payload)


def allocated_of(plan: plan_pb2.Plan) -> list[Ref]:
    """Return the blocks that a plan allocates for tables."""
    changes = decoded(plan.SerializeToString()).changes
    return [
        block
        for change in changes
        for block, is_new in zip(change.blocks, change.allocated, strict=True)
        if is_new
    ]


def spans_of(plan: plan_pb2.Plan) -> list[Span]:
    """Return the tokens that a plan computes for each sequence."""
    return decoded(plan.SerializeToString()).spans


def publications_of(
    message: plan_pb2.Publications,
) -> list[tuple[tuple[str, str], Prefix]]:
    """Return publications, each with its tenant and namespace."""
    block_ids, parents = (
        zip(
            columns.read(INT32, getattr(message, f"{of}indices"), "indices"),
            columns.read(INT64, getattr(message, f"{of}generations"), "generations"),
            strict=True,
        )
        for of in ("", "parent_")
    )
    hashes, token_ids = (
        columns.fixed(message.hashes, 16),
        columns.fixed(message.token_ids, 4 * BLOCK),
    )
    prefixes = map(Prefix._make, zip(block_ids, parents, hashes, token_ids, strict=True))
    return [((message.tenant, message.namespace), prefix) for prefix in prefixes]
