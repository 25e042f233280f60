"""Pools as the command shows them: status and pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click
from rich.console import Console

from kvplane.cli.group import command, with_pool
from kvplane.cli.values import Context, only_pool, print_json, share, table_of
from kvplane.clients.control_client import ControlClient
from kvplane.errors import NotPermittedError
from kvplane.results import PoolInfo
from kvplane.wire.v1 import types_pb2 as tpb

TIERS: Final[dict[int, str]] = {tpb.TIER_DEVICE: "device", tpb.TIER_HOST: "host"}
Pools = dict[str, PoolInfo]


async def _pools(client: ControlClient) -> Pools:
    """Fetch the descriptions of all pools, in the order of their ids."""
    return {pool_id: await client.get_pool(pool_id) for pool_id in await client.list_pools()}


async def _counters(client: ControlClient, pool_id: str) -> Mapping[str, int]:
    """Fetch a pool's counters; empty where the caller lacks the role operator."""
    try:
        return await client.get_counters(pool_id)
    except NotPermittedError:
        return {}


@command
async def status(context: Context) -> int:
    """The control plane and its pools; exit code 0 if all of them are ready."""
    async with context.client() as client:
        plane = await client.get_server_info()
        pools = await _pools(client)
        counters = {pool_id: await _counters(client, pool_id) for pool_id in pools}
    rows = [
        {
            "pool": pool_id,
            "ready": pool.ready,
            "shards": f"{sum(s.connected for s in pool.shards)} of {_num_shards(pool)}",
            "sessions": counters[pool_id].get("sessions", "-"),
            "sequences": _num_sequences(counters[pool_id]),
            "device_blocks_used": share(*_used(pool)),
        }
        for pool_id, pool in pools.items()
    ]
    if context.json:
        plane_row = {"version": plane.version, "incarnation": str(plane.incarnation)}
        print_json({"address": context.control_plane, **plane_row, "pools": rows})
    else:
        title = f"control plane {context.control_plane}, version {plane.version}"
        Console().print(table_of(rows, title) if rows else f"{title}: no pool has registered")
    return 0 if rows and all(pool.ready for pool in pools.values()) else 1


@command
async def pools(context: Context) -> int:
    """Tiers and shards of each pool."""
    async with context.client() as client:
        described = await _pools(client)
    tiers = [
        {
            "pool": pool_id,
            "tier": TIERS[tier.tier],
            "blocks": tier.num_blocks,
            "free": tier.num_free_blocks,
            "cached": tier.num_cached_blocks,
            "held": tier.num_held_blocks,
            "retired": tier.num_retired_blocks,
        }
        for pool_id, pool in described.items()
        for tier in pool.usage
    ]
    shards = [
        {
            "pool": pool_id,
            "shard": info.shard.index,
            "address": info.address,
            "connected": info.connected,
            "epoch": str(info.epoch),
        }
        for pool_id, pool in described.items()
        for info in pool.shards
    ]
    if context.json:
        print_json({"tiers": tiers, "shards": shards})
    else:
        Console().print(table_of(tiers), "", table_of(shards), sep="\n")
    return 0


@command
@with_pool
async def sessions(context: Context, pool: str) -> int:
    """The open sessions of this caller's tenant."""
    async with context.client() as client:
        pool_ids = [pool] if pool else await client.list_pools()
        rows = [
            {
                "pool": pool_id,
                "session": str(session.session_id),
                "client": session.client_name,
                "namespace": session.namespace,
                "sequences": session.num_sequences,
                "held_blocks": session.num_held_blocks,
                "plans_in_flight": session.num_plans_in_flight,
                "last_number": session.last_number,
                "lease_s": round(session.time_to_live_s, 1),
            }
            for pool_id in pool_ids
            for session in await client.list_sessions(pool_id)
        ]
    context.show(rows)
    return 0


@command
@click.argument("session", type=int)
@with_pool
async def sequences(context: Context, session: int, pool: str) -> int:
    """The sequences of SESSION; exit code 1 if it is not open."""
    async with context.client() as client:
        pool_id = only_pool(await client.list_pools(), pool)
        listed = await client.list_sessions(pool_id)
        found = [each for each in listed if each.session_id == session]
        states = [s for each in found for s in await client.list_sequences(each)]
    rows = [
        {
            "sequence": state.sequence_id,
            "tier": TIERS[state.tier],
            "tokens": state.num_tokens,
            "scheduled": state.num_scheduled_tokens,
            "written": state.num_written_tokens,
            "cached": state.num_cached_tokens,
            "blocks": state.num_blocks,
        }
        for state in states
    ]
    context.show(rows)
    return 0 if found else 1


def _num_sequences(counters: Mapping[str, int]) -> int | str:
    """Return the live sequences of both tiers, without waiting ones; a dash if not known."""
    if not counters:
        return "-"
    return sum(counters[f'sequences{{state="{tier}"}}'] for tier in TIERS.values())


def _used(pool: PoolInfo) -> tuple[int, int]:
    """Return the number of device blocks held or retired, and of all device blocks."""
    for tier in pool.usage:
        if tier.tier == tpb.TIER_DEVICE:
            return tier.num_held_blocks + tier.num_retired_blocks, tier.num_blocks
    return 0, 0


def _num_shards(pool: PoolInfo) -> int:
    return max((info.shard.num_shards for info in pool.shards), default=0)
