"""The control plane's side of a data plane, for tests: grants and plans, signed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from google.protobuf.message import Message

from kvplane.layout import LayerGroup, Layout
from kvplane.wire import columns, signing
from kvplane.wire.plane.v1 import plan_pb2 as plans
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION
from kvplane.wire.v1 import types_pb2 as pb

_uint8, _int32, _int64 = (
    partial(columns.pack, kind) for kind in (columns.UINT8, columns.INT32, columns.INT64)
)
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
    num_shards: int = 1  # all of one epoch

    def sign(self, tag: str, payload: bytes) -> pb.SignedPayload:
        signature = signing.sign(self.key, tag, payload)
        return pb.SignedPayload(type=tag, payload=payload, signature=signature)

    def session(self, session_id: int) -> pb.SessionRef:
        return pb.SessionRef(incarnation=self.incarnation, session_id=session_id)

    def grant(self, session_id: int = 1, **fields: Any) -> pb.SignedPayload:
        """Return a session's grant; its ordinal is the session's id unless ``ordinal`` is given."""
        values: dict[str, Any] = {
            "version": NEWEST_PAYLOAD_VERSION,
            "session": self.session(session_id),
            "ordinal": session_id,
            "pool_id": POOL_ID,
            "shard_epochs": [self.epoch] * self.num_shards,
            "tenant": "default",
            "layout_fingerprint": self.layout.fingerprint,
            "max_plans_in_flight": 2,
        }
        grant = plans.SessionGrant(**{**values, **fields})
        return self.sign(signing.GRANT, grant.SerializeToString())

    def plan(
        self,
        number: int,
        session_id: int = 1,
        *,
        changes: Sequence[Change] | plans.TableChanges = (),
        transfers: Sequence[Transfer] | plans.Transfers = (),
        spans: Sequence[Span] | plans.Spans = (),
        allocations: Sequence[BlockRef] | plans.Allocations = (),
        **fields: Any,
    ) -> pb.SignedPayload:
        """Return a plan that follows plan ``number - 1`` unless ``previous`` is given."""
        values: dict[str, Any] = {
            "version": NEWEST_PAYLOAD_VERSION,
            "session": self.session(session_id),
            "pool_id": POOL_ID,
            "shard_epochs": [self.epoch] * self.num_shards,
            "number": number,
            "previous": number - 1,
            "changes": packed(changes, pack_changes),
            "transfers": packed(transfers, pack_transfers),
            "spans": packed(spans, pack_spans),
            "allocations": packed(allocations, pack_allocations),
        }
        plan = plans.Plan(**{**values, **fields})
        return self.sign(signing.PLAN, plan.SerializeToString())

    def read_receipt(self, signed: pb.SignedPayload | None) -> plans.Receipt:
        """Return the receipt, after a check of its signature."""
        assert signed is not None, "there is no receipt"
        signing.verify(
            self.key,
            signing.RECEIPT,
            signed.type,
            signed.payload,
            signed.signature,
            field="receipt",
        )
        return plans.Receipt.FromString(signed.payload)


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a table. ``blocks``: (index, generation) of each entry set."""

    kind: int
    sequence_id: int
    tier: int = 0
    first_block: int = 0
    num_blocks: int = 0
    parent: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    allocated: tuple[bool, ...] = ()
    group: int = 0


def int32(*values: int) -> bytes:
    """Return a column of the elements."""
    return _int32(values)


def int64(*values: int) -> bytes:
    """Return a column of the elements."""
    return _int64(values)


class BlockRef(NamedTuple):
    """One block, as it was when it was allocated."""

    tier: pb.Tier
    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Transfer:
    source: BlockRef
    destination: BlockRef
    group: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    sequence_id: int
    first_position: int
    num_tokens: int


def set_blocks(
    sequence_id: int,
    blocks: Sequence[tuple[int, int]],
    *,
    allocated: bool | Sequence[bool] = True,
    first_block: int = 0,
    tier: pb.Tier = DEVICE,
    replace: bool = False,
    group: int = 0,
) -> Change:
    """``blocks``: (index, generation) pairs."""
    kind = plans.TABLE_CHANGE_KIND_REPLACE if replace else plans.TABLE_CHANGE_KIND_SET
    flags = [allocated] * len(blocks) if isinstance(allocated, bool) else allocated
    entries = tuple(blocks), tuple(flags), group
    return Change(kind, sequence_id, tier, first_block, len(blocks), None, *entries)


def fork(sequence_id: int, parent: int, num_blocks: int) -> Change:
    return Change(plans.TABLE_CHANGE_KIND_FORK, sequence_id, num_blocks=num_blocks, parent=parent)


def drop(sequence_id: int) -> Change:
    return Change(plans.TABLE_CHANGE_KIND_DROP, sequence_id)


def truncate(sequence_id: int, num_blocks: int) -> Change:
    return Change(plans.TABLE_CHANGE_KIND_TRUNCATE, sequence_id, num_blocks=num_blocks)


def trim(sequence_id: int, num_blocks: int) -> Change:
    return Change(plans.TABLE_CHANGE_KIND_TRIM, sequence_id, num_blocks=num_blocks)


def keep(sequence_id: int, num_blocks: int) -> Change:
    return Change(plans.TABLE_CHANGE_KIND_KEEP, sequence_id, num_blocks=num_blocks)


def ref(index: int, generation: int = 1, tier: pb.Tier = DEVICE) -> BlockRef:
    return BlockRef(tier, index, generation)


def transfer(source: BlockRef, destination: BlockRef) -> Transfer:
    return Transfer(source, destination)


def forked(child: int, parent: int, entry: int, source: int, copy: int) -> list[Change | Transfer]:
    """Return parts of a plan that forks a sequence up to a table entry, of which the child gets a
    copy: block ``copy`` of generation 1, of block ``source``.
    """
    own = set_blocks(child, [(copy, 1)], first_block=entry)
    return [fork(child, parent, entry + 1), own, transfer(ref(source), ref(copy))]


def moved(
    sequence_id: int, sources: Sequence[BlockRef], destinations: Sequence[BlockRef]
) -> list[Change | Transfer]:
    """Return parts of a plan that move a whole table to new blocks, all of one tier."""
    entries = [(block.index, block.generation) for block in destinations]
    table = set_blocks(sequence_id, entries, tier=destinations[0].tier, replace=True)
    return [table, *map(transfer, sources, destinations)]


def span(sequence_id: int, first_position: int, num_tokens: int) -> Span:
    return Span(sequence_id, first_position, num_tokens)


Part = Change | BlockRef | Transfer | Span
"""A part of a plan; a block on its own is one that the plan allocates for no table."""
_FIELDS: dict[type, str] = {
    Change: "changes",
    BlockRef: "allocations",
    Transfer: "transfers",
    Span: "spans",
}


def fields_of(parts: Iterable[Part]) -> dict[str, list[Any]]:
    """Return the fields of a plan that has these parts."""
    fields: dict[str, list[Any]] = {}
    for part in parts:
        fields.setdefault(_FIELDS[type(part)], []).append(part)
    return fields


def packed(parts: Any, pack: Callable[[Any], Any]) -> Any:
    """Return a plan's parts packed; a message as it is."""
    return parts if isinstance(parts, Message) else pack(parts)


def pack_changes(changes: Sequence[Change]) -> plans.TableChanges:
    entries = [block for change in changes for block in change.blocks]
    return plans.TableChanges(
        kinds=_uint8(c.kind for c in changes),
        sequence_ids=_int64(c.sequence_id for c in changes),
        groups=_uint8(c.group for c in changes) if any(c.group for c in changes) else b"",
        tiers=_uint8(c.tier for c in changes),
        first_blocks=_int32(c.first_block for c in changes),
        num_blocks=_int32(c.num_blocks for c in changes),
        parent_sequence_ids=_int64(c.parent for c in changes if c.parent is not None),
        indices=_int32(index for index, _ in entries),
        generations=_int64(generation for _, generation in entries),
        allocated=_uint8(int(flag) for c in changes for flag in c.allocated),
    )


def pack_allocations(blocks: Sequence[BlockRef]) -> plans.Allocations:
    return plans.Allocations(
        tiers=_uint8(b.tier for b in blocks),
        indices=_int32(b.index for b in blocks),
        generations=_int64(b.generation for b in blocks),
    )


def pack_transfers(transfers: Sequence[Transfer]) -> plans.Transfers:
    return plans.Transfers(
        groups=_uint8(t.group for t in transfers) if any(t.group for t in transfers) else b"",
        source_tiers=_uint8(t.source.tier for t in transfers),
        source_indices=_int32(t.source.index for t in transfers),
        source_generations=_int64(t.source.generation for t in transfers),
        destination_tiers=_uint8(t.destination.tier for t in transfers),
        destination_indices=_int32(t.destination.index for t in transfers),
        destination_generations=_int64(t.destination.generation for t in transfers),
    )


def pack_spans(spans: Sequence[Span]) -> plans.Spans:
    return plans.Spans(
        sequence_ids=_int64(s.sequence_id for s in spans),
        first_positions=_int32(s.first_position for s in spans),
        num_tokens=_int32(s.num_tokens for s in spans),
    )


def publications(*blocks: tuple[int, int]) -> plans.Publications:
    """Return one for each (index, generation), each the child of the one before it."""
    parents = [(-1, 0), *blocks[:-1]] if blocks else []
    return plans.Publications(
        tenant="default",
        namespace="",
        hash_algorithm="xxh3-128",
        indices=_int32(index for index, _ in blocks),
        generations=_int64(generation for _, generation in blocks),
        parent_indices=_int32(index for index, _ in parents),
        parent_generations=_int64(generation for _, generation in parents),
        hashes=b"".join(bytes([index % 256]) * 16 for index, _ in blocks),
        token_ids=b"".join(_int32([index] * BLOCK_SIZE) for index, _ in blocks),
    )


def blocks_of(message: pb.Blocks | plans.Publications) -> list[tuple[int, int]]:
    """Return (index, generation) of each block."""
    indices = columns.read(columns.INT32, message.indices, "indices")
    generations = columns.read(columns.INT64, message.generations, "generations")
    return list(zip(indices, generations, strict=True))


def tokens(num_tokens: int, num_heads: int = 2, *, seed: int = 0) -> torch.Tensor:
    """Return float32 [num_tokens, num_heads, 16]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_heads, 16, generator=generator)


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window_tokens: int = 0
) -> torch.Tensor:
    """Causal attention in float64 of a sequence's last query tokens over all of it, or over the
    last ``window_tokens`` that each of them sees.

    query [Q, H, D], key and value [T, Hkv, D]. Returns [Q, H, D].
    """
    group = query.shape[1] // key.shape[1]
    q = query.double()
    k = key.double().repeat_interleave(group, dim=1)
    v = value.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,thd->hqt", q, k) / query.shape[2] ** 0.5
    first = key.shape[0] - query.shape[0]
    behind = first + torch.arange(query.shape[0])[:, None] - torch.arange(key.shape[0])
    visible = (behind >= 0) & (behind < (window_tokens or key.shape[0]))
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights, v).to(query.dtype)
