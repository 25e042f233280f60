"""Declares and exports the metrics of the control plane; docs/reference/metrics.md lists them.

The core's state is read at each scrape; events are counted as they happen.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from control_plane.observing import PoolObservation
from control_plane.pools.statistics import (
    ALLOCATION_BOUNDS_S,
    DURATION_BOUNDS_S,
    WAIT_BOUNDS_S,
)
from control_plane.sessions.sessions import END_CAUSES
from control_plane.steps.answers import StepAnswer
from kvplane.serving.observability.histogram import Histogram
from kvplane.serving.observability.metrics import (
    LATENCY_BUCKETS_S,
    Counts,
    Declaration,
    PlaneMetrics,
    Samples,
)
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb


def _gauge(name: str, help: str, *labels: str) -> Declaration:
    return Declaration("gauge", f"kvplane_{name}", help, ("pool", *labels))


def _counter(name: str, help: str, *labels: str) -> Declaration:
    return Declaration("counter", f"kvplane_{name}_total", help, ("pool", *labels))


def _histogram(name: str, help: str, bounds: tuple[float, ...], *labels: str) -> Declaration:
    return Declaration("histogram", f"kvplane_{name}_seconds", help, ("pool", *labels), bounds)


_RUN: Final = Declaration(
    "gauge", "kvplane_control_plane_info", "1, with this run's incarnation.", ("incarnation",)
)
_LEADS: Final = Declaration(
    "gauge", "kvplane_control_plane_leads", "1 while this process serves, 0 while it stands by.", ()
)
_BLOCKS: Final = _gauge(
    "blocks",
    "Blocks by what they are used for; the states of a tier add up to all its blocks.",
    "tier",
    "state",
)
_PEAK_HELD: Final = _gauge("max_held_blocks", "The most device blocks ever held at one time.")
_SESSIONS: Final = _gauge("sessions", "Open sessions.")
_SEQUENCES: Final = _gauge(
    "sequences",
    "Sequences: live ones by tier, and admissions and swap-ins that wait in the queue.",
    "state",
)
_POOL_READY: Final = _gauge("pool_ready", "1 when sessions can be opened.")
_SHARDS: Final = _gauge("pool_shards", "Shards that the pool has when all are registered.")
_REGISTERED: Final = _gauge("registered_shards", "Data planes whose registration stream is open.")
_HEARTBEAT_AGE: Final = _gauge(
    "heartbeat_age_seconds", "Time since a data plane's last message.", "shard"
)
_PLANS_IN_FLIGHT: Final = _gauge("plans_in_flight", "Plans made and not yet receipted.")
_OLDEST_PLAN: Final = _gauge(
    "oldest_plan_age_seconds", "Age of the plan that waits longest for its receipt; 0 for none."
)
_MISSING_RECEIPTS: Final = _gauge(
    "missing_receipts",
    "Plans that another shard of the pool has receipted and this one has not.",
    "shard",
)
_OLDEST_RETIRED: Final = _gauge(
    "oldest_retired_age_seconds",
    "For how long the longest retired blocks have been retired; 0 for none.",
)
_WATCHERS: Final = _gauge("followers", "Streams that watch the prefix index.")

_OPERATIONS: Final = Declaration(
    "counter",
    "kvplane_operations_total",
    "Items of operations answered: an append, fork or free has one for each sequence.",
    ("operation", "status"),
)
_REFUSED_ITEMS: Final = Declaration(
    "counter",
    "kvplane_refused_items_total",
    "Of these, items that were not done: LATER and NEVER by the shortage's reason, FAILED by the "
    "error's.",
    ("operation", "status", "reason"),
)
_TENANT_ITEMS: Final = Declaration(
    "counter",
    "kvplane_tenant_items_total",
    "The same items by tenant: those of the access list, and all others together.",
    ("tenant", "status"),
)
_TENANT_SESSIONS: Final = Declaration(
    "gauge", "kvplane_tenant_sessions", "Open sessions by tenant.", ("tenant",)
)
_TENANT_BLOCKS: Final = Declaration(
    "gauge", "kvplane_tenant_blocks", "Device blocks in tables of a tenant.", ("tenant",)
)
_PLANS: Final = Declaration("counter", "kvplane_plans_total", "Plans sent.")
_STEP_DURATION: Final = Declaration(
    "histogram",
    "kvplane_step_duration_seconds",
    "Time that a step takes inside the control plane.",
    (),
    LATENCY_BUCKETS_S,
)
_ALLOCATION_DURATION: Final = _histogram(
    "allocation_duration",
    "Time that one operation of a step takes in the core, all its items together.",
    ALLOCATION_BOUNDS_S,
    "operation",
)
_ADMISSION_WAIT: Final = _histogram(
    "admission_wait", "Time that granted admissions waited in the queue.", WAIT_BOUNDS_S
)
_FENCE_DURATION: Final = _histogram(
    "fence_duration",
    "Time from a session's end until every data plane has fenced it.",
    WAIT_BOUNDS_S,
)
_BLOCK_LIFETIME: Final = _histogram(
    "block_lifetime", "Time from a block's publication to its eviction.", DURATION_BOUNDS_S, "tier"
)
_BLOCK_IDLE: Final = _histogram(
    "block_idle_before_eviction",
    "Time from the last admission that found a block, or its publication, to its eviction.",
    DURATION_BOUNDS_S,
    "tier",
)
_REUSE_GAP: Final = _histogram(
    "block_reuse_gap",
    "Time between two admissions that found a block, or its publication and the first.",
    DURATION_BOUNDS_S,
    "tier",
)

_LOOKUP_TOKENS: Final = _counter("lookup_tokens", "Prompt tokens looked up at admission.")
_HIT_TOKENS: Final = _counter("hit_tokens", "Of these, tokens found cached.", "tier")
_REREAD_LOOKUP: Final = _counter(
    "reread_lookup_tokens",
    "Of the tokens looked up, those of sequences that were admitted again after they were cut.",
)
_REREAD_HIT: Final = _counter("reread_hit_tokens", "Of these, tokens found cached.")
_EVICTIONS: Final = _counter(
    "evictions",
    "Published blocks allocated for another use: the eviction policy's next (policy), a retained "
    "one when nothing else was left (retained), or one that its session released and took back "
    "before a receipt (own).",
    "tier",
    "reason",
)
_DEMOTED: Final = _counter(
    "demoted_blocks", "Published blocks moved to the host tier where they would have been evicted."
)
_PUBLICATIONS: Final = _counter("publications", "Blocks published.")
_FORGOTTEN: Final = _counter("forgotten_blocks", "Published blocks forgotten.")
_INDEX_CHANGES: Final = _counter("index_changes", "Changes of the prefix index: its revision.")
_COPIES: Final = _counter("copies_on_write", "Blocks copied for their writer.")
_SWAPPED: Final = _counter("swapped_blocks", "Blocks swapped between the tiers.", "direction")
_GRANTED: Final = _counter(
    "granted_admissions", "Admissions that waited in the queue and were granted."
)
_CUT: Final = _counter(
    "cut_sequences",
    "Sequences cut: for those that grow, at the end of a turn, or because they were idle.",
    "reason",
)
_EXPIRED: Final = _counter("sessions_expired", "Sessions whose lease ran out.")
_RECLAIMED: Final = _counter(
    "reclaimed_blocks",
    "Blocks in the tables of sessions when they ended: closed, expired, a shard's new epoch, or a "
    "shard's missing receipt.",
    "cause",
)
_ABORTS: Final = _counter("aborts", "Plans aborted by request.")
_RESYNCS: Final = _counter("resyncs", "Sessions that asked for all tables again.")
_EPOCH_CHANGES: Final = _counter(
    "epoch_changes", "Data planes that came back as another process: the pool's sessions end."
)

DECLARATIONS: Final = tuple(value for value in vars().values() if type(value) is Declaration)

_SCRAPE_TIMEOUT_S: Final = 5.0
_STATUS_NAMES: Final = {
    pb.ITEM_STATUS_LATER: "later",
    pb.ITEM_STATUS_NEVER: "never",
    pb.ITEM_STATUS_FAILED: "failed",
}
_TIER_NAMES: Final = {tpb.TIER_DEVICE: "device", tpb.TIER_HOST: "host"}
_CUT_REASONS: Final = ("growth", "turn", "idle")
_COUNTERS: Final = (
    (_LOOKUP_TOKENS, "num_lookup_tokens"),
    (_DEMOTED, "num_demoted_blocks"),
    (_PUBLICATIONS, "num_publications"),
    (_FORGOTTEN, "num_forgotten_blocks"),
    (_COPIES, "num_copies_on_write"),
)
_STATISTICS: Final = (
    (_GRANTED, "num_granted_admissions"),
    (_REREAD_LOOKUP, "reread_lookup_tokens"),
    (_REREAD_HIT, "reread_hit_tokens"),
    (_EXPIRED, "num_expired_sessions"),
    (_ABORTS, "num_aborts"),
    (_RESYNCS, "num_resyncs"),
    (_EPOCH_CHANGES, "num_epoch_changes"),
)

Observed = tuple[list[PoolObservation], Mapping[tuple[str, int], float]]
"""The pools' snapshots, and seconds since each shard's last message, by pool and index."""


class ControlPlaneMetrics(PlaneMetrics):
    """Counters and histograms that the servicer updates, in a registry of their own."""

    def __init__(self, incarnation: int) -> None:
        super().__init__("control", DECLARATIONS)
        self.operations = Counts()
        self.refused_items = Counts()
        self.tenant_items = Counts()
        self.tenant_label: Callable[[str], str] = lambda tenant: tenant
        self.num_plans = 0
        self.incarnation = incarnation
        self.leads = True
        self._step_duration = Histogram(LATENCY_BUCKETS_S)
        self._observe: Callable[[], Observed] = lambda: ([], {})

    def count_step(self, answer: StepAnswer, tenant: str, duration_s: float) -> None:
        """Count an answered step, its operations, their refused items and its plan."""
        tenant = self.tenant_label(tenant)
        self._step_duration.add(duration_s)
        self.num_plans += answer.has_plan
        for (operation, message), result in zip(answer.operations, answer.results, strict=True):
            kind, failures = operation.name or "none", result.failures
            for failure in failures:
                status = _STATUS_NAMES[failure.status]
                self.operations.inc(kind, status)
                self.tenant_items.inc(tenant, status)
                self.refused_items.inc(kind, status, _reason_of(failure))
            if not failures or result.num_table_blocks or result.num_released_blocks:
                num_done = operation.num_items(message) - len(failures)
                self.operations.inc(kind, "ok", by=num_done)
                self.tenant_items.inc(tenant, "ok", by=num_done)

    def read_pools(self, observe: Callable[[], Observed]) -> None:
        """Register ``observe``, which is called at each scrape and whose snapshots are exported."""
        self._observe = observe

    def read_pools_on(
        self, loop: asyncio.AbstractEventLoop, observe: Callable[[], Observed]
    ) -> None:
        """Register ``observe`` as ``read_pools`` does, but run it on the event loop ``loop``:
        scrapes come on another thread.
        """

        async def read() -> Observed:
            return observe()

        self.read_pools(
            lambda: asyncio.run_coroutine_threadsafe(read(), loop).result(_SCRAPE_TIMEOUT_S)
        )

    def read(self, samples: Samples) -> None:
        pools, heartbeat_ages = self._observe()
        samples.add(_RUN, 1, str(self.incarnation))
        samples.add(_LEADS, int(self.leads))
        samples.add_counts(_OPERATIONS, self.operations)
        samples.add_counts(_REFUSED_ITEMS, self.refused_items)
        samples.add(_PLANS, self.num_plans)
        samples.add_histogram(_STEP_DURATION, self._step_duration)
        samples.add_counts(_TENANT_ITEMS, self.tenant_items)
        tenants = Counter[tuple[Declaration, str]]()
        for (pool_id, shard), age_s in heartbeat_ages.items():
            samples.add(_HEARTBEAT_AGE, age_s, pool_id, str(shard))
        for pool in pools:
            _add_gauges(samples, pool)
            _add_counters(samples, pool)
            _add_times(samples, pool)
            for tenant, (num_sessions, num_blocks) in pool.tenants.items():
                tenants[_TENANT_SESSIONS, self.tenant_label(tenant)] += num_sessions
                tenants[_TENANT_BLOCKS, self.tenant_label(tenant)] += num_blocks
        for (declaration, tenant), value in tenants.items():
            samples.add(declaration, value, tenant)


def counters_of(pool: PoolObservation) -> dict[str, int]:
    """Return the pool's gauges and whole-number counters, named as at /metrics but without
    "kvplane_" and the label of the pool.
    """
    samples = Samples(DECLARATIONS, {})
    _add_gauges(samples, pool)
    _add_counters(samples, pool)
    counters = {}
    for metric in samples.metrics():
        for sample in metric.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k != "pool")
            name = sample.name.removeprefix("kvplane_") + (f"{{{labels}}}" if labels else "")
            counters[name] = int(sample.value)
    return counters


def _reason_of(failure: pb.ItemFailure) -> str:
    if failure.status == pb.ITEM_STATUS_FAILED:
        return failure.error.reason
    name = pb.ShortageReason.Name(failure.shortage.reason)
    return name.removeprefix("SHORTAGE_REASON_").lower()


def _add_gauges(samples: Samples, pool: PoolObservation) -> None:
    pool_id, description = pool.pool_id, pool.description
    blocks = Counter[tuple[str, str]]()  # of all layer groups
    for tier in description.usage:
        name = _TIER_NAMES[tier.tier]
        blocks[name, "free"] += tier.num_free_blocks
        blocks[name, "cached"] += tier.num_cached_blocks
        blocks[name, "held"] += tier.num_held_blocks
        blocks[name, "retired"] += tier.num_retired_blocks
    for (name, state), num_blocks in blocks.items():
        samples.add(_BLOCKS, num_blocks, pool_id, name, state)
    for declaration, value in (
        (_PEAK_HELD, pool.counters.max_held_blocks),
        (_SESSIONS, pool.num_sessions),
        (_POOL_READY, description.ready),
        (_SHARDS, pool.num_shards),
        (_REGISTERED, sum(shard.connected for shard in description.shards)),
        (_PLANS_IN_FLIGHT, pool.num_plans_in_flight),
        (_WATCHERS, pool.num_watchers),
    ):
        samples.add(declaration, value, pool_id)
    for shard, num_missing in enumerate(pool.num_missing_receipts):
        samples.add(_MISSING_RECEIPTS, num_missing, pool_id, str(shard))
    for live_on, num_sequences in pool.num_sequences.items():
        samples.add(_SEQUENCES, num_sequences, pool_id, _TIER_NAMES[live_on])
    samples.add(_SEQUENCES, pool.num_waiting, pool_id, "waiting")


def _add_counters(samples: Samples, pool: PoolObservation) -> None:
    pool_id, counters, statistics = pool.pool_id, pool.counters, pool.statistics
    for declaration, name in _COUNTERS:
        samples.add(declaration, getattr(counters, name), pool_id)
    for declaration, name in _STATISTICS:
        samples.add(declaration, getattr(statistics, name), pool_id)
    num_on_device = counters.num_hit_tokens - counters.num_host_hit_tokens
    samples.add(_HIT_TOKENS, num_on_device, pool_id, "device")
    samples.add(_HIT_TOKENS, counters.num_host_hit_tokens, pool_id, "host")
    samples.add(_INDEX_CHANGES, pool.revision, pool_id)
    samples.add(_SWAPPED, counters.num_swapped_out_blocks, pool_id, "out")
    samples.add(_SWAPPED, counters.num_swapped_in_blocks, pool_id, "in")
    for reason in _CUT_REASONS:
        samples.add(_CUT, statistics.cut_sequences[reason], pool_id, reason)
    for cause in END_CAUSES.values():
        samples.add(_RECLAIMED, statistics.reclaimed_blocks[cause], pool_id, cause)
    for tier, times in pool.block_times.items():
        for reason, num_evictions in times.num_evictions.items():
            samples.add(_EVICTIONS, num_evictions, pool_id, _TIER_NAMES[tier], reason)


def _add_times(samples: Samples, pool: PoolObservation) -> None:
    pool_id, statistics = pool.pool_id, pool.statistics
    samples.add(_OLDEST_PLAN, pool.oldest_plan_s, pool_id)
    samples.add(_OLDEST_RETIRED, pool.oldest_release_s, pool_id)
    for operation, histogram in statistics.allocation_s.items():
        samples.add_histogram(_ALLOCATION_DURATION, histogram, pool_id, operation or "none")
    samples.add_histogram(_ADMISSION_WAIT, statistics.wait_s, pool_id)
    samples.add_histogram(_FENCE_DURATION, statistics.fence_s, pool_id)
    for tier, times in pool.block_times.items():
        name = _TIER_NAMES[tier]
        samples.add_histogram(_BLOCK_LIFETIME, times.lifetime, pool_id, name)
        samples.add_histogram(_BLOCK_IDLE, times.idle, pool_id, name)
        samples.add_histogram(_REUSE_GAP, times.reuse_gap, pool_id, name)
