"""Snapshots of pools for metrics: sessions, plans in flight, missing receipts, ages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from control_plane.pools.pool import Pool
from control_plane.pools.reports import TIERS
from control_plane.pools.statistics import BlockTimes, PoolCounters, PoolStatistics
from control_plane.sessions.session import Session
from control_plane.sessions.silent_shards import num_missing_receipts
from kvplane.wire.v1 import pool_pb2 as ppb
from kvplane.wire.v1 import types_pb2 as tpb


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """A pool's state at one moment, for metrics. ``num_sessions``: open ones. ``num_sequences``:
    live ones, by tier. ``num_waiting``: admissions and swap-ins in the queue.
    ``num_missing_receipts``: plans that another shard has receipted and this one has not, by shard
    index. ``oldest_plan_s``: the age of the plan that waits longest for a receipt, 0 for none.
    ``oldest_release_s``: for how long the longest retired blocks have been so. ``tenants``: open
    sessions of each tenant that has some, and device blocks that their tables refer to.
    """

    pool_id: str
    description: ppb.GetPoolResponse
    counters: PoolCounters
    num_sessions: int
    num_shards: int
    revision: int
    num_sequences: dict[tpb.Tier, int]
    num_waiting: int
    num_missing_receipts: list[int]
    num_plans_in_flight: int
    oldest_plan_s: float
    oldest_release_s: float
    num_watchers: int
    block_times: dict[tpb.Tier, BlockTimes]
    statistics: PoolStatistics
    tenants: dict[str, tuple[int, int]]


def observe(pool: Pool, sessions: Collection[Session], now_s: float) -> PoolObservation:
    """Return a snapshot of a pool and its sessions, for metrics. ``now_s``: monotonic seconds."""
    pool.set_time(now_s)
    made_s = [at_s for session in sessions if (at_s := session.oldest_plan_s()) is not None]
    num_sessions = Counter(session.tenant for session in sessions)
    return PoolObservation(
        pool_id=pool.id,
        description=pool.info(),
        counters=pool.counters(),
        num_sessions=len(sessions),
        num_shards=pool.shards.num_shards,
        revision=pool.revision(),
        num_sequences={tier: pool.primary.num_sequences_in(tier) for tier in TIERS},
        num_waiting=sum(session.queued is not None for session in sessions),
        num_missing_receipts=num_missing_receipts(pool.shards.num_shards, [*sessions]),
        num_plans_in_flight=sum(len(session.plans) for session in sessions),
        oldest_plan_s=now_s - min(made_s, default=now_s),
        oldest_release_s=max(group.oldest_release_s() for group in pool.groups),
        num_watchers=len(pool.watchers),
        block_times=pool.block_times(),
        statistics=pool.statistics,
        tenants={each: (num, pool.num_owned(each)) for each, num in num_sessions.items()},
    )
