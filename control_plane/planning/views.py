"""A pool as a page shows it to one tenant: all blocks by state, and of sessions, sequences and
prefixes those of the tenant. Values are what JSON has; times are seconds of the monotonic clock, so
that a view changes only when the pool does. Nothing is taken and nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, Final, cast

from control_plane.planning.pools.pool import Pool
from control_plane.planning.pools.publications import HASH_BYTES, owner_of
from control_plane.planning.pools.reports import TIERS
from control_plane.planning.queries import states
from control_plane.planning.session import Session
from kvplane.results import sequence_states
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64

STATES: Final = ("free", "cached", "retired", "pinned", "held")
"""Of blocks, by the number that a cell has."""
TIER_NAMES: Final = {tpb.TIER_DEVICE: "device", tpb.TIER_HOST: "host"}

# What is left out of a view is counted in it.
_MAX_CELLS: Final = 4096
_MAX_SESSIONS: Final = 50
_MAX_SEQUENCES: Final = 100
_MAX_TABLE_BLOCKS: Final = 256
_MAX_NAMESPACES: Final = 8
_MAX_ENTRIES: Final = 10_000


def view(pool: Pool, sessions: Iterable[Session], tenant: str, now_s: float) -> dict[str, Any]:
    """The pool with the tenant's ``sessions``. ``now_s``: monotonic seconds."""
    pool.set_time(now_s)
    mine = sorted(sessions, key=lambda session: session.id)
    info = pool.info(sum(pool.lead.num_sequences_in(tier) for tier in TIERS))
    return {
        "id": pool.id,
        "ready": info.ready,
        "model": pool.layout.model_id,
        "block_size_tokens": pool.block_size,
        "num_sessions": info.num_sessions,
        "num_sequences": info.num_sequences,
        "shards": [
            {"index": each.shard.index, "address": each.address, "connected": each.connected}
            for each in info.shards
        ],
        "counters": {
            field.name: getattr(info.counters, field.name)
            for field in info.counters.DESCRIPTOR.fields
        },
        "maps": [_map(pool, group, tier) for group in range(len(pool.groups)) for tier in TIERS],
        "sessions": _sessions(mine),
        "prefixes": _prefixes(pool, tenant, now_s),
    }


def _map(pool: Pool, group: int, tier: tpb.Tier) -> dict[str, Any]:
    """A digit for each cell, the index of its state."""
    core = pool.groups[group]
    blocks_per_cell, cells = core.block_map(tier, _MAX_CELLS)
    num_blocks, num_free, num_cached, num_held, num_retired = core.usage(tier)
    return {
        "group": pool.layout.groups[group].name,
        "tier": TIER_NAMES[tier],
        "num_blocks": num_blocks,
        "num_in": {
            "free": num_free,
            "cached": num_cached,
            "retired": num_retired,
            "held": num_held,
        },
        "blocks_per_cell": blocks_per_cell,
        "cells": "".join(map(str, cells)),
    }


def _sessions(sessions: list[Session]) -> list[dict[str, Any]]:
    room = _MAX_SEQUENCES
    shown = []
    for session in sessions[:_MAX_SESSIONS]:
        sequences = list(islice(sequence_states(states(session)), room))
        room -= len(sequences)
        shown.append(
            {
                "id": str(session.id),  # JSON's numbers are exact to 2^53
                "num_sequences": session.native.num_sequences(session.slot),
                "num_held_blocks": session.num_held(),
                "num_plans_in_flight": len(session.plans),
                "last_number": session.numbers.last,
                "sequences": [
                    {
                        "id": str(each.sequence_id),
                        "num_tokens": each.num_tokens,
                        "num_written_tokens": each.num_written_tokens,
                        "num_cached_tokens": each.num_cached_tokens,
                        "num_blocks": each.num_blocks,
                        "tier": TIER_NAMES[cast(tpb.Tier, each.tier)],
                        "table": _table(session, each.sequence_id),
                    }
                    for each in sequences
                ],
            }
        )
    return shown


def _table(session: Session, sequence_id: int) -> list[int]:
    """The first blocks of the first layer group; -1 behind an attention window."""
    _, indices, *_ = session.pool.lead.table(session.slot, sequence_id)
    return columns.read(INT32, indices, "indices")[:_MAX_TABLE_BLOCKS].tolist()


def _prefixes(pool: Pool, tenant: str, now_s: float) -> list[dict[str, Any]]:
    """The tenant's prefixes of each namespace, as runs of blocks without branches."""
    owned = ((root, *owner_of(root)) for root in pool.roots())
    mine = sorted((namespace, root) for root, owner, namespace in owned if owner == tenant)
    return [_tree(pool, namespace, root, now_s) for namespace, root in mine[:_MAX_NAMESPACES]]


def _tree(pool: Pool, namespace: str, root: bytes, now_s: float) -> dict[str, Any]:
    is_whole, parents, num_device, num_host, num_hits, ages_ms, idle_ms, hashes = (
        pool.lead.prefix_tree(root, _MAX_ENTRIES)
    )
    return {
        "namespace": namespace,
        "is_whole": is_whole,
        "runs": [
            {
                "parent": parent,
                "num_device_blocks": device,
                "num_host_blocks": host,
                "num_hits": hits,
                "published_s": round(now_s - age_ms / 1000),
                "used_s": round(now_s - idle / 1000),
                "hash": block_hash.hex(),
            }
            for parent, device, host, hits, age_ms, idle, block_hash in zip(
                columns.read(INT32, parents, "parents"),
                columns.read(INT32, num_device, "num_device"),
                columns.read(INT32, num_host, "num_host"),
                columns.read(INT64, num_hits, "num_hits"),
                columns.read(INT64, ages_ms, "ages_ms"),
                columns.read(INT64, idle_ms, "idle_ms"),
                columns.fixed(hashes, HASH_BYTES),
                strict=True,
            )
        ],
    }
