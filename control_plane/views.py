"""A pool as a page shows it to one tenant: all blocks by state, and the sessions and sequences of
the tenant. Values are JSON's. It only reads.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any, Final, cast

from control_plane.pools.pool import Pool
from control_plane.pools.reports import TIERS
from control_plane.queries import states
from control_plane.sessions.session import Session
from kvplane.results import sequence_states
from kvplane.wire.v1 import types_pb2 as tpb

STATES: Final = ("free", "cached", "retired", "pinned", "held")
"""Names of the states of blocks; a cell of the page's map holds an index into them."""
TIER_NAMES: Final = {tpb.TIER_DEVICE: "device", tpb.TIER_HOST: "host"}

# A view counts what exceeds these bounds.
_MAX_CELLS: Final = 4096
_MAX_SESSIONS: Final = 50
_MAX_SEQUENCES: Final = 100


def view(pool: Pool, sessions: Collection[Session], tenant: str) -> dict[str, Any]:
    """Return the pool as JSON values, with those of its open ``sessions`` that are the tenant's."""
    own = [session for session in sessions if session.tenant == tenant]
    counters = pool.counters()
    return {
        "id": pool.id,
        "ready": pool.ready,
        "model": pool.layout.model_id,
        "block_size_tokens": pool.block_size,
        "num_sessions": len(sessions),
        "num_sequences": sum(pool.primary.num_sequences_in(tier) for tier in TIERS),
        "num_lookup_tokens": counters.num_lookup_tokens,
        "num_hit_tokens": counters.num_hit_tokens,
        "num_evictions": counters.num_evictions,
        "maps": [_map(pool, group, tier) for group in range(len(pool.groups)) for tier in TIERS],
        "sessions": _sessions(sorted(own, key=lambda session: session.id)),
    }


def _map(pool: Pool, group: int, tier: tpb.Tier) -> dict[str, Any]:
    """Return a digit for each cell of the page's map of blocks: an index into ``STATES``."""
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
                "num_sequences": session.native.num_sequences(session.handle),
                "num_held_blocks": session.num_held(),
                "sequences": [
                    {
                        "id": str(each.sequence_id),
                        "num_tokens": each.num_tokens,
                        "num_cached_tokens": each.num_cached_tokens,
                        "num_blocks": each.num_blocks,
                        "tier": TIER_NAMES[cast(tpb.Tier, each.tier)],
                    }
                    for each in sequences
                ],
            }
        )
    return shown
