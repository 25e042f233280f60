"""Cached prefixes as the command shows and changes them: lookup, explain, watch, retain, forget."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from kvplane import ops
from kvplane.cli.values import Context, only_pool, print_json
from kvplane.clients.prefix_feed import BlocksRemoved, BlocksStored, CaughtUp, PrefixEvent
from kvplane.layout import Layout
from kvplane.session import Session
from kvplane.wire.v1 import types_pb2 as tpb


@asynccontextmanager
async def session_on(context: Context, pool: str, namespace: str) -> AsyncIterator[Session]:
    """Open a session for one query."""
    async with context.client() as client:
        pool_id = only_pool(await client.list_pools(), pool)
        layout = Layout.from_proto((await client.get_pool(pool_id)).layout)
        opened = await client.open_session(pool_id, layout, "kvplane command", namespace=namespace)
        async with opened as session:
            yield session


async def lookup(context: Context, tokens: list[int], pool: str, namespace: str) -> int:
    """Show how much of a prompt each pool has cached."""
    async with context.client() as client:
        matches = await client.find_prefix(
            tokens, pool_ids=[pool] if pool else [], namespace=namespace
        )
    context.show(
        [
            {
                "pool": match.pool_id,
                "prompt_tokens": len(tokens),
                "device_tokens": match.num_device_tokens,
                "host_tokens": match.num_host_tokens,
                "revision": match.revision,
            }
            for match in matches
        ]
    )
    return 0


async def explain(context: Context, tokens: list[int], pool: str, namespace: str) -> int:
    """Show the cached blocks of a prompt's prefix."""
    async with session_on(context, pool, namespace) as session:
        blocks = await session.explain_prefix(tokens)
    rows = [{**asdict(block), "tier": _tier(block.tier)} for block in blocks]
    context.show(rows)
    return 0


async def watch(context: Context, pool: str, namespace: str, count: int) -> int:
    """Print each change of the index on a line, ``count`` lines; 0: until interrupted."""
    async with context.client() as client:
        pool_id = only_pool(await client.list_pools(), pool)
        shown = 0
        async for event in client.watch(pool_id, namespace=namespace):
            for line in _lines(event):
                if context.as_json:
                    print_json(line)
                else:
                    print(" ".join(str(value) for value in line.values()), flush=True)
                shown += 1
                if shown == count:
                    return 0
    return 0


async def retain(
    context: Context, tokens: list[int], pool: str, namespace: str, ttl_s: float, priority: int
) -> int:
    """Keep a prompt's cached prefix longer."""
    async with session_on(context, pool, namespace) as session:
        result = await session.run(ops.retain(tokens, time_to_live_s=ttl_s, priority=priority))
    retained = result.results[0].retain
    context.show(
        [{"retained_blocks": retained.num_retained_blocks, "for_s": ttl_s, "priority": priority}]
    )
    return 0


async def forget(
    context: Context, what: list[int] | ops.Scope, pool: str, namespace: str, force: bool
) -> int:
    """Take prefixes out of the index."""
    async with session_on(context, pool, namespace) as session:
        result = await session.run(ops.forget(what, force=force))
    context.show([{"forgotten_blocks": result.results[0].forget.num_forgotten_blocks}])
    return 0


def _lines(event: PrefixEvent) -> list[dict[str, object]]:
    if isinstance(event, BlocksStored):
        return [
            {"event": "stored", "block": block.block_hash.hex(), "tier": _tier(block.tier)}
            for block in event.blocks
        ]
    if isinstance(event, BlocksRemoved):
        return [
            {"event": "removed", "block": block.hex(), "tier": _tier(tier)}
            for block, tier in event.blocks
        ]
    if isinstance(event, CaughtUp):
        return [{"event": "caught_up", "revision": event.revision}]
    return [{"event": "cleared"}]


def _tier(tier: int) -> str:
    return tpb.Tier.Name(tpb.Tier.ValueType(tier)).removeprefix("TIER_").lower()
