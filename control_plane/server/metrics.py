"""All metrics of the control plane.

What the core keeps is read from it at each scrape; events are counted as they happen.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from control_plane.observing import PoolObservation
from control_plane.pools.statistics import EVICTION_REASONS
from control_plane.server import metric_declarations as declared
from control_plane.sessions.session import END_CAUSES
from control_plane.steps.plain_steps import PlainAnswer
from kvplane.serving.observability.histogram import Histogram
from kvplane.serving.observability.metrics import LATENCY_BUCKETS_S, Counts, PlaneMetrics, Samples
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns
from kvplane.wire.columns import INT64

_SCRAPE_TIMEOUT_S: Final = 5.0
_STATUS_NAMES: Final = {
    pb.OPERATION_STATUS_LATER: "later",
    pb.OPERATION_STATUS_NEVER: "never",
    pb.OPERATION_STATUS_FAILED: "failed",
}
_TIER_NAMES: Final = {tpb.TIER_DEVICE: "device", tpb.TIER_HOST: "host"}
# Operations of several items; the others are one item.
_COLUMN_OPERATIONS: Final = ("append", "fork", "free", "truncate")
_CUT_REASONS: Final = ("growth", "turn", "idle")
_COUNTERS: Final = (
    (declared.LOOKUP_TOKENS, "num_lookup_tokens"),
    (declared.DEMOTED, "num_demoted_blocks"),
    (declared.PUBLICATIONS, "num_publications"),
    (declared.FORGOTTEN, "num_forgotten_blocks"),
    (declared.COPIES, "num_copies_on_write"),
    (declared.GRANTED, "num_granted_admissions"),
)
_STATISTICS: Final = (
    (declared.REREAD_LOOKUP, "reread_lookup_tokens"),
    (declared.REREAD_HIT, "reread_hit_tokens"),
    (declared.EXPIRED, "num_expired_sessions"),
    (declared.ABORTS, "num_aborts"),
    (declared.RESYNCS, "num_resyncs"),
    (declared.EPOCH_CHANGES, "num_epoch_changes"),
)

Observed = tuple[list[PoolObservation], Mapping[tuple[str, int], float]]
"""The pools, and the age in seconds of each shard's last message, by pool and shard index."""


class ControlPlaneMetrics(PlaneMetrics):
    """Counters and histograms that the servicer updates, in a registry of their own."""

    def __init__(self, incarnation: int) -> None:
        super().__init__("control", declared.DECLARATIONS)
        self.operations = Counts()
        self.refused_items = Counts()
        self.num_plans = 0
        self.incarnation = incarnation
        self.leads = True
        self._step_duration = Histogram(LATENCY_BUCKETS_S)
        self._observe: Callable[[], Observed] = lambda: ([], {})

    def count_step(
        self, operations: Iterable[pb.Operation], result: pb.StepResult, duration_s: float
    ) -> None:
        """Count a step that was answered, its operations and its plan."""
        self._step_duration.add(duration_s)
        self.num_plans += result.HasField("plan")
        for operation, done in zip(operations, result.results, strict=True):
            kind = operation.WhichOneof("operation") or "none"
            for failure in done.failures:
                status = _STATUS_NAMES[failure.status]
                self.operations.inc(kind, status)
                self.refused_items.inc(kind, status, _reason_of(failure))
            if done.WhichOneof("done") is not None:
                num_done = _num_items(operation, kind) - len(done.failures)
                self.operations.inc(kind, "ok", by=num_done)

    def count_plain_step(self, answer: PlainAnswer, duration_s: float) -> None:
        """The same of a plain step, of which all items were done."""
        self._step_duration.add(duration_s)
        self.num_plans += answer.has_plan
        if answer.kind:
            self.operations.inc(answer.kind, "ok", by=answer.num_done)

    def read_pools(self, observe: Callable[[], Observed]) -> None:
        """Export what ``observe`` says of the pools at each scrape."""
        self._observe = observe

    def read_pools_on(
        self, loop: asyncio.AbstractEventLoop, observe: Callable[[], Observed]
    ) -> None:
        """The same, of an ``observe`` that must run on ``loop``: scrapes come on a thread."""

        async def read() -> Observed:
            return observe()

        self.read_pools(
            lambda: asyncio.run_coroutine_threadsafe(read(), loop).result(_SCRAPE_TIMEOUT_S)
        )

    def read(self, samples: Samples) -> None:
        pools, heartbeat_ages = self._observe()
        samples.add(declared.RUN, 1, str(self.incarnation))
        samples.add(declared.LEADS, int(self.leads))
        samples.add_counts(declared.OPERATIONS, self.operations)
        samples.add_counts(declared.REFUSED_ITEMS, self.refused_items)
        samples.add(declared.PLANS, self.num_plans)
        samples.add_histogram(declared.STEP_DURATION, self._step_duration)
        for (pool_id, shard), age_s in heartbeat_ages.items():
            samples.add(declared.HEARTBEAT_AGE, age_s, pool_id, str(shard))
        for pool in pools:
            _add_gauges(samples, pool)
            _add_counters(samples, pool)
            _add_times(samples, pool)


def _reason_of(failure: pb.ItemFailure) -> str:
    if failure.status == pb.OPERATION_STATUS_FAILED:
        return failure.error.reason
    name = pb.ShortageReason.Name(failure.shortage.reason)
    return name.removeprefix("SHORTAGE_REASON_").lower()


def _num_items(operation: pb.Operation, kind: str) -> int:
    if kind in _COLUMN_OPERATIONS:
        return columns.count(INT64, getattr(operation, kind).sequence_ids)
    return 1


def _add_gauges(samples: Samples, pool: PoolObservation) -> None:
    pool_id, told = pool.pool_id, pool.description
    blocks = Counter[tuple[str, str]]()  # of all layer groups
    for tier in told.usage.tiers:
        name = _TIER_NAMES[tier.tier]
        blocks[name, "free"] += tier.num_free_blocks
        blocks[name, "cached"] += tier.num_cached_blocks
        blocks[name, "held"] += tier.num_held_blocks
        blocks[name, "retired"] += tier.num_retired_blocks
    for (name, state), num_blocks in blocks.items():
        samples.add(declared.BLOCKS, num_blocks, pool_id, name, state)
    for declaration, value in (
        (declared.PEAK_HELD, told.counters.max_held_blocks),
        (declared.SESSIONS, told.num_sessions),
        (declared.POOL_READY, told.ready),
        (declared.SHARDS, pool.num_shards),
        (declared.REGISTERED, sum(shard.connected for shard in told.shards)),
        (declared.PLANS_IN_FLIGHT, pool.num_plans_in_flight),
        (declared.OLDEST_PLAN, pool.oldest_plan_s),
        (declared.OLDEST_RETIRED, pool.oldest_release_s),
        (declared.FOLLOWERS, pool.num_followers),
    ):
        samples.add(declaration, value, pool_id)
    for shard, num_missing in enumerate(pool.num_missing_receipts):
        samples.add(declared.MISSING_RECEIPTS, num_missing, pool_id, str(shard))
    for live_on, num_sequences in pool.num_sequences.items():
        samples.add(declared.SEQUENCES, num_sequences, pool_id, _TIER_NAMES[live_on])
    samples.add(declared.SEQUENCES, pool.num_waiting, pool_id, "waiting")


def _add_counters(samples: Samples, pool: PoolObservation) -> None:
    pool_id, counters, statistics = pool.pool_id, pool.description.counters, pool.statistics
    for declaration, name in _COUNTERS:
        samples.add(declaration, getattr(counters, name), pool_id)
    for declaration, name in _STATISTICS:
        samples.add(declaration, getattr(statistics, name), pool_id)
    num_on_device = counters.num_hit_tokens - counters.num_host_hit_tokens
    samples.add(declared.HIT_TOKENS, num_on_device, pool_id, "device")
    samples.add(declared.HIT_TOKENS, counters.num_host_hit_tokens, pool_id, "host")
    samples.add(declared.INDEX_CHANGES, pool.revision, pool_id)
    samples.add(declared.SWAPPED, counters.num_swapped_out_blocks, pool_id, "out")
    samples.add(declared.SWAPPED, counters.num_swapped_in_blocks, pool_id, "in")
    for reason in _CUT_REASONS:
        samples.add(declared.CUT, statistics.cut_sequences[reason], pool_id, reason)
    for cause in END_CAUSES.values():
        samples.add(declared.RECLAIMED, statistics.reclaimed_blocks[cause], pool_id, cause)


def _add_times(samples: Samples, pool: PoolObservation) -> None:
    pool_id, statistics = pool.pool_id, pool.statistics
    for operation, histogram in statistics.allocation_s.items():
        samples.add_histogram(declared.ALLOCATION_DURATION, histogram, pool_id, operation or "none")
    samples.add_histogram(declared.ADMISSION_WAIT, statistics.wait_s, pool_id)
    samples.add_histogram(declared.FENCE_DURATION, statistics.fence_s, pool_id)
    for tier, times in pool.block_times.items():
        name = _TIER_NAMES[tier]
        for reason in EVICTION_REASONS:
            samples.add(declared.EVICTIONS, times.num_evictions[reason], pool_id, name, reason)
        samples.add_histogram(declared.BLOCK_LIFETIME, times.lifetime, pool_id, name)
        samples.add_histogram(declared.BLOCK_IDLE, times.idle, pool_id, name)
        samples.add_histogram(declared.REUSE_GAP, times.reuse_gap, pool_id, name)
