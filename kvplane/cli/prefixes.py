"""Cached prefixes as the command shows and changes them: lookup, explain, watch, retain, forget."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from kvplane.cli.group import POSITIVE, command, with_namespace, with_pool, with_tokens
from kvplane.cli.pools import TIERS
from kvplane.cli.values import Context, only_pool, print_json
from kvplane.prefixes import (
    DEFAULT_PRIORITY,
    BlocksRemoved,
    BlocksStored,
    CaughtUp,
    ForgetScope,
    PrefixEvent,
)

_SCOPES: Final = {"namespace": ForgetScope.NAMESPACE, "tenant": ForgetScope.TENANT}


@command
@with_tokens
@with_pool
@with_namespace
async def lookup(context: Context, tokens: list[int], pool: str, namespace: str) -> int:
    """How much of a prompt each pool has cached."""
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


@command
@with_tokens
@with_pool
@with_namespace
async def explain(context: Context, tokens: list[int], pool: str, namespace: str) -> int:
    """The cached blocks of a prompt, their hits, age and references."""
    async with context.client() as client:
        pool_id = only_pool(await client.list_pools(), pool)
        (match,) = await client.find_prefix(
            tokens, pool_ids=[pool_id], namespace=namespace, with_blocks=True
        )
    context.show(
        [
            {**asdict(each), "block_hash": each.block_hash.hex(), "tier": TIERS[each.tier]}
            for each in match.blocks
        ]
    )
    return 0


@command
@with_pool
@with_namespace
@click.option("--count", default=0, type=click.IntRange(min=0), help="Lines; 0: no end.")
async def watch(context: Context, pool: str, namespace: str, count: int) -> int:
    """Each change of a pool's prefix index, until Ctrl-C."""
    async with context.client() as client:
        pool_id = only_pool(await client.list_pools(), pool)
        shown = 0
        async for event in client.watch_prefixes(pool_id, namespace=namespace):
            for line in _lines(event):
                if context.json:
                    print_json(line)
                else:
                    print(" ".join(str(value) for value in line.values()), flush=True)
                shown += 1
                if shown == count:
                    return 0
    return 0


@command
@with_tokens
@with_pool
@with_namespace
@click.option("--ttl-s", default=3600.0, type=POSITIVE, help="For how long.")
@click.option(
    "--priority",
    default=DEFAULT_PRIORITY,
    type=click.IntRange(1, 100),
    help="Among retained prefixes; 1 is evicted first.",
)
async def retain(
    context: Context, tokens: list[int], pool: str, namespace: str, ttl_s: float, priority: int
) -> int:
    """Keep a cached prefix longer than others."""
    async with context.client() as client:
        num_blocks = await client.retain_prefix(
            only_pool(await client.list_pools(), pool),
            tokens,
            namespace=namespace,
            time_to_live_s=ttl_s,
            priority=priority,
        )
    context.show([{"retained_blocks": num_blocks, "for_s": ttl_s, "priority": priority}])
    return 0


@command
@with_tokens
@click.option("--all-of", type=click.Choice(list(_SCOPES)), help="In place of TOKENS.")
@with_pool
@with_namespace
@click.option("--force", is_flag=True, help="Also what sequences refer to.")
async def forget(
    context: Context,
    tokens: list[int] | None,
    all_of: str | None,
    pool: str,
    namespace: str,
    force: bool,
) -> int:
    """Take cached prefixes out of the index."""
    if (tokens is None) == (all_of is None):
        raise click.UsageError("give either TOKENS or --all-of")
    what = _SCOPES[all_of] if all_of is not None else tokens or []
    async with context.client() as client:
        forgotten = await client.forget_prefixes(
            only_pool(await client.list_pools(), pool), what, namespace=namespace, force=force
        )
    context.show([{"forgotten_blocks": forgotten.num_forgotten_blocks}])
    return 0


def _lines(event: PrefixEvent) -> list[dict[str, object]]:
    if isinstance(event, BlocksStored):
        return [
            {"event": "stored", "block": block.block_hash.hex(), "tier": TIERS[block.tier]}
            for block in event.blocks
        ]
    if isinstance(event, BlocksRemoved):
        return [
            {"event": "removed", "block": block.hex(), "tier": TIERS[tier]}
            for block, tier in event.blocks
        ]
    if isinstance(event, CaughtUp):
        return [{"event": "caught_up", "revision": event.revision}]
    return [{"event": "cleared"}]
