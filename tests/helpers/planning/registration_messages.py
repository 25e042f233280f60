"""Data planes' messages, made by hand: hellos, block reports and receipts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvplane_blocks import chained_hash, root_hash

from control_plane.pools.publications import root_of
from kvplane import ops
from kvplane.layout import LayerGroup, Layout
from kvplane.wire import columns, protocol, signing
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb

LAYOUT = Layout("test-model", 8, "float32", "float32", (LayerGroup("full", (0, 1), 2, 8),))
WHOLE = tpb.Shard(num_shards=1, num_layers=2, num_kv_heads=2)
TENANT, NAMESPACE = "default", ""


def half(index: int, num_shards: int = 2) -> tpb.Shard:
    """Return the shard of one KV head."""
    return tpb.Shard(
        index=index, num_shards=num_shards, num_layers=2, first_kv_head=index, num_kv_heads=1
    )


def hello(**fields: Any) -> rpb.Hello:
    """Return a Hello of a whole pool unless ``fields`` say otherwise."""
    defaults = {
        "version": "test",
        "oldest_payload_version": protocol.OLDEST_PAYLOAD_VERSION,
        "newest_payload_version": protocol.NEWEST_PAYLOAD_VERSION,
        "pool_id": "pool",
        "shard": WHOLE,
        "epoch": 11,
        "layout": LAYOUT.to_proto(),
        "num_device_blocks": 16,
        "num_host_blocks": 8,
        "address": "127.0.0.1:1",
    }
    return rpb.Hello(**{**defaults, **fields})


def blocks(generations: Mapping[int, int], tier: tpb.Tier = tpb.TIER_DEVICE) -> tpb.Blocks:
    """Return the generations of blocks, by index."""
    return tpb.Blocks(
        tier=tier,
        indices=columns.pack(INT32, generations.keys()),
        generations=columns.pack(INT64, generations.values()),
    )


class Prefix(NamedTuple):
    """One publication: ``parent`` is (index, generation), (-1, 0) for the first of a prompt."""

    block: tuple[int, int]
    parent: tuple[int, int]
    hash: bytes
    tokens: bytes


def chain(tokens: Iterable[int], placed: Iterable[tuple[int, int]], **owner: str) -> list[Prefix]:
    """Return the prefixes of a prompt in these (index, generation)s, one for each full block."""
    packed, size = ops.pack_tokens(list(tokens)), LAYOUT.block_size_tokens * 4
    names = {"tenant": TENANT, "namespace": NAMESPACE, **owner}
    hash_ = root_hash(root_of(LAYOUT.fingerprint, **names))
    parent, prefixes = (-1, 0), []
    for i, block in enumerate(placed):
        of_block = packed[i * size : (i + 1) * size]
        hash_ = chained_hash(hash_, of_block)
        prefixes.append(Prefix(block, parent, hash_, of_block))
        parent = block
    return prefixes


def publications(prefixes: Iterable[Prefix], **fields: Any) -> plan_pb2.Publications:
    """Return them as a message, in which they are published and reported."""
    prefixes = list(prefixes)
    defaults = {
        "tenant": TENANT,
        "namespace": NAMESPACE,
        "hash_algorithm": "xxh3-128",
        "indices": columns.pack(INT32, [p.block[0] for p in prefixes]),
        "generations": columns.pack(INT64, [p.block[1] for p in prefixes]),
        "parent_indices": columns.pack(INT32, [p.parent[0] for p in prefixes]),
        "parent_generations": columns.pack(INT64, [p.parent[1] for p in prefixes]),
        "hashes": b"".join(p.hash for p in prefixes),
        "token_ids": b"".join(p.tokens for p in prefixes),
    }
    return plan_pb2.Publications(**{**defaults, **fields})


def report(
    generations: Mapping[int, int] | None = None, *prefixes: Prefix, last: bool = True
) -> rpb.BlockReport:
    """Return a report of device blocks and their contents."""
    return rpb.BlockReport(
        blocks=[blocks(generations)] if generations else [],
        publications=[publications(prefixes)] if prefixes else [],
        last=last,
    )


def signed(key: bytes, payload: bytes, type_tag: str = signing.RECEIPT) -> tpb.SignedPayload:
    """Return these bytes as a payload that a pool's key signed."""
    signature = signing.sign(key, type_tag, payload)
    return tpb.SignedPayload(type=type_tag, payload=payload, signature=signature)


def receipt(
    key: bytes, plan: tpb.SignedPayload, of: rpb.Hello, **changes: Any
) -> tpb.SignedPayload:
    """Return what the data plane of this Hello says when the plan has run."""
    what = plan_pb2.Plan.FromString(plan.payload)
    fields = {
        "version": protocol.NEWEST_PAYLOAD_VERSION,
        "session": what.session,
        "pool_id": what.pool_id,
        "shard_index": of.shard.index,
        "epoch": of.epoch,
        "plan_number": what.number,
        "plan_digest": signing.digest(plan.payload),
    }
    message = plan_pb2.Receipt(**{**fields, **changes})
    return signed(key, message.SerializeToString(deterministic=True))


def all_outgoing(registration: Any, pool_id: str, index: int) -> list[rpb.RegisterResponse]:
    """Return all messages for a shard, with those that it may have missed."""
    messages: list[rpb.RegisterResponse] = registration.take_outgoing(pool_id, index)
    while (missed := registration.take_missed(pool_id, index)) is not None:
        messages += missed
    return messages
