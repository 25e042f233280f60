"""All metrics of the control plane.

What the core keeps is read from it at each scrape; events are counted as they happen.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvplane import columns
from kvplane.columns import INT64
from kvplane.serving.metrics import LATENCY_BUCKETS_S, RpcMetrics
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb

_SCRAPE_TIMEOUT_S: Final = 5.0
_STATUS_NAMES: Final = {
    pb.OPERATION_STATUS_LATER: "later",
    pb.OPERATION_STATUS_NEVER: "never",
    pb.OPERATION_STATUS_FAILED: "failed",
}
_TIER_NAMES: Final = {tpb.TIER_DEVICE: "device", tpb.TIER_HOST: "host"}
# Operations of several items; the others are one item.
_COLUMN_OPERATIONS: Final = ("append", "fork", "free", "truncate")

# Pools by their ids.
Pools = Mapping[str, pb.DescribePoolResponse]


class ControlPlaneMetrics:
    """Counters and histograms that the servicer updates, in a registry of their own."""

    def __init__(self, incarnation: int) -> None:
        self.registry = CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.operations = Counter(
            "kvplane_operations_total",
            "Items of operations answered: an append, fork or free has one for each sequence.",
            ["operation", "status"],
            registry=self.registry,
        )
        self.plans = Counter("kvplane_plans_total", "Plans sent.", registry=self.registry)
        self.step_duration = Histogram(
            "kvplane_step_duration_seconds",
            "Time that a step takes inside the control plane.",
            registry=self.registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self.sessions_expired = Counter(
            "kvplane_sessions_expired_total",
            "Sessions whose lease ran out.",
            registry=self.registry,
        )
        Gauge("kvplane_incarnation", "This run of the control plane.", registry=self.registry).set(
            incarnation
        )

    def count_step(
        self, operations: Iterable[pb.Operation], result: pb.StepResult, duration_s: float
    ) -> None:
        """Count a step that was answered, its operations and its plan."""
        self.step_duration.observe(duration_s)
        if result.HasField("plan"):
            self.plans.inc()
        for operation, done in zip(operations, result.results, strict=True):
            kind = operation.WhichOneof("operation") or "none"
            for failure in done.failures:
                self.operations.labels(kind, _STATUS_NAMES[failure.status]).inc()
            if done.WhichOneof("done") is not None:
                num_done = _num_items(operation, kind) - len(done.failures)
                self.operations.labels(kind, "ok").inc(num_done)

    def watch_pools(self, loop: asyncio.AbstractEventLoop, describe: Callable[[], Pools]) -> None:
        """Export what ``describe``, which must run on ``loop``, says of the pools."""
        self.registry.register(_PoolCollector(loop, describe))


def _num_items(operation: pb.Operation, kind: str) -> int:
    if kind in _COLUMN_OPERATIONS:
        return columns.count(INT64, getattr(operation, kind).sequence_ids)
    return 1


class _PoolCollector(Collector):
    """Reads the pools at each scrape. Scrapes come on a thread; the core is read on its own
    loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, describe: Callable[[], Pools]) -> None:
        self._loop = loop
        self._describe = describe

    def collect(self) -> Iterator[Metric]:
        async def read() -> Pools:
            return self._describe()

        pools = asyncio.run_coroutine_threadsafe(read(), self._loop).result(_SCRAPE_TIMEOUT_S)
        yield _blocks(pools)
        yield _gauge(pools, "kvplane_sessions", "Open sessions.", lambda p: p.num_sessions)
        yield _gauge(pools, "kvplane_sequences", "Live sequences.", lambda p: p.num_sequences)
        yield _gauge(
            pools, "kvplane_pool_ready", "1 when sessions can be opened.", lambda p: p.ready
        )
        yield _gauge(
            pools,
            "kvplane_registered_shards",
            "Data planes whose registration stream is open.",
            lambda p: sum(shard.connected for shard in p.shards),
        )
        yield _gauge(
            pools,
            "kvplane_max_held_blocks",
            "The most device blocks ever held at one time.",
            lambda p: p.counters.max_held_blocks,
        )
        yield from _counters(pools)


def _blocks(pools: Pools) -> Metric:
    family = GaugeMetricFamily(
        "kvplane_blocks",
        "Blocks by what they are used for; the states of a tier add up to all its blocks.",
        labels=("pool", "tier", "state"),
    )
    for pool_id, pool in pools.items():
        states: defaultdict[tuple[str, str], int] = defaultdict(int)  # of all layer groups
        for tier in pool.usage.tiers:
            name = _TIER_NAMES[tier.tier]
            states[name, "free"] += tier.num_free_blocks
            states[name, "cached"] += tier.num_cached_blocks
            states[name, "held"] += tier.num_held_blocks
            states[name, "retired"] += tier.num_retired_blocks
        for (name, state), num_blocks in states.items():
            family.add_metric((pool_id, name, state), num_blocks)
    return family


def _gauge(
    pools: Pools, name: str, help: str, value: Callable[[pb.DescribePoolResponse], int]
) -> Metric:
    family = GaugeMetricFamily(name, help, labels=("pool",))
    for pool_id, pool in pools.items():
        family.add_metric((pool_id,), value(pool))
    return family


def _counters(pools: Pools) -> Iterator[Metric]:
    for name, help, attribute in (
        ("kvplane_lookup_tokens", "Prompt tokens looked up at admission.", "num_lookup_tokens"),
        ("kvplane_hit_tokens", "Prompt tokens found cached at admission.", "num_hit_tokens"),
        ("kvplane_copies_on_write", "Blocks copied for their writer.", "num_copies_on_write"),
        ("kvplane_evictions", "Published blocks allocated for another use.", "num_evictions"),
        ("kvplane_publications", "Blocks published.", "num_publications"),
        (
            "kvplane_host_hit_tokens",
            "Of the tokens found cached, those in the host tier.",
            "num_host_hit_tokens",
        ),
        (
            "kvplane_demoted_blocks",
            "Published blocks moved to the host tier where they would have been evicted.",
            "num_demoted_blocks",
        ),
        ("kvplane_forgotten_blocks", "Published blocks forgotten.", "num_forgotten_blocks"),
        ("kvplane_cut_sequences", "Sequences cut for others.", "num_cut_sequences"),
        (
            "kvplane_granted_admissions",
            "Admissions that waited in line and were granted.",
            "num_granted_admissions",
        ),
    ):
        family = CounterMetricFamily(name, help, labels=("pool",))
        for pool_id, pool in pools.items():
            family.add_metric((pool_id,), getattr(pool.counters, attribute))
        yield family
    swapped = CounterMetricFamily(
        "kvplane_swapped_blocks", "Blocks swapped between the tiers.", labels=("pool", "direction")
    )
    for pool_id, pool in pools.items():
        swapped.add_metric((pool_id, "out"), pool.counters.num_swapped_out_blocks)
        swapped.add_metric((pool_id, "in"), pool.counters.num_swapped_in_blocks)
    yield swapped
