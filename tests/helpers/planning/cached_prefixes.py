"""A namespace's cached prefixes, in the wire's view: which blocks are found, how each is kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvplane import ops
from kvplane.clients.prefix_feed import BlocksStored, CaughtUp, StoredBlock, read_events
from kvplane.results import PoolMatch
from kvplane.wire.v1 import prefix_pb2 as pb
from tests.helpers.planning.control_wire import PATIENCE_S, Stub

Kept = tuple[int, int, int, int, int, int]
"""Tier, index, generation, references, hits and the priority of a retention."""


@dataclass(frozen=True)
class CachedPrefixes:
    """``blocks``: the hash and the tier of each that is found. ``kept``: by the longest prefixes,
    how each of their blocks is kept. The time that a retention still lasts is not shown.
    """

    revision: int
    blocks: frozenset[tuple[bytes, int]]
    kept: frozenset[tuple[bytes, tuple[Kept, ...]]]


async def cached_prefixes(stub: Stub, pool_id: str, namespace: str) -> CachedPrefixes:
    """Return all that is cached in the namespace. Asking counts as no use of it."""
    stored, revision = await snapshot(stub, pool_id, namespace)
    kept = set()
    by_hash = {block.block_hash: block for block in stored}
    parents = {block.parent_hash for block in stored}
    for block_hash in by_hash.keys() - parents:
        request = pb.FindPrefixRequest(
            token_ids=ops.pack_tokens(prompt_of(block_hash, by_hash)),
            namespace=namespace,
            pool_ids=[pool_id],
            with_blocks=True,
        )
        (match,) = (await stub.FindPrefix(request)).matches
        described = tuple(
            (b.tier, b.index, b.generation, b.ref_count, b.num_hits, b.priority)
            for b in PoolMatch.from_proto(match).blocks
        )
        kept.add((block_hash, described))
    found = frozenset((block.block_hash, block.tier) for block in stored)
    return CachedPrefixes(revision, found, frozenset(kept))


async def snapshot(stub: Stub, pool_id: str, namespace: str) -> tuple[list[StoredBlock], int]:
    """Return the blocks of a new follower's snapshot, and their revision."""
    call = stub.WatchPrefixes(pb.WatchPrefixesRequest(pool_id=pool_id, namespace=namespace))
    stored: list[StoredBlock] = []
    try:
        while True:
            for event in read_events(await asyncio.wait_for(call.read(), PATIENCE_S)):
                if isinstance(event, BlocksStored):
                    stored += event.blocks
                elif isinstance(event, CaughtUp):
                    return stored, event.revision
    finally:
        call.cancel()


def prompt_of(block_hash: bytes, by_hash: dict[bytes, StoredBlock]) -> list[int]:
    """Return the tokens of the prefix that ends with this block, from its first known block on."""
    blocks: list[StoredBlock] = []
    while (block := by_hash.get(block_hash)) is not None:
        blocks.append(block)
        block_hash = block.parent_hash
    return [token_id for block in reversed(blocks) for token_id in block.token_ids]
