"""All metrics of the control plane.

What the core knows anyway is read from it when Prometheus asks; what only passes by is counted as
it does.
"""

from __future__ import annotations

import asyncio
from collections import Counter as TallyCounter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from control_plane.planning.model import (
    Admit,
    Append,
    Fork,
    Free,
    Operation,
    PoolInfo,
    StepOutcome,
    SwapIn,
    SwapOut,
)
from kvplane.serving.metrics import LATENCY_BUCKETS_S, RpcMetrics

_SCRAPE_TIMEOUT_S: Final = 5.0
_OPERATION_NAMES: Final[dict[type[Operation], str]] = {
    Admit: "admit",
    Append: "append",
    Fork: "fork",
    Free: "free",
    SwapOut: "swap_out",
    SwapIn: "swap_in",
}


class ControlPlaneMetrics:
    """Counters and histograms that the servicer moves, in a registry of their own."""

    def __init__(self, incarnation: int) -> None:
        self.registry = CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.operations = Counter(
            "kvplane_operations_total",
            "Operations answered.",
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
        Gauge(
            "kvplane_incarnation", "This process's life, as a number.", registry=self.registry
        ).set(incarnation)

    def count_step(
        self, operations: Sequence[Operation], outcome: StepOutcome, duration_s: float
    ) -> None:
        """Count a step that was answered, its operations and its plan."""
        self.step_duration.observe(duration_s)
        if outcome.plan is not None:
            self.plans.inc()
        tally = TallyCounter(
            (type(operation), result.status)
            for operation, result in zip(operations, outcome.results, strict=True)
        )
        for (kind, status), count in tally.items():
            self.operations.labels(_OPERATION_NAMES[kind], status.value).inc(count)

    def watch_pools(
        self, loop: asyncio.AbstractEventLoop, describe: Callable[[], Sequence[PoolInfo]]
    ) -> None:
        """Export what ``describe``, which must run on ``loop``, says of the pools."""
        self.registry.register(_PoolCollector(loop, describe))


class _PoolCollector(Collector):
    """Reads the pools at each scrape. Scrapes come on a thread; the core is read on its own
    loop.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, describe: Callable[[], Sequence[PoolInfo]]
    ) -> None:
        self._loop = loop
        self._describe = describe

    def collect(self) -> Iterator[Metric]:
        async def read() -> Sequence[PoolInfo]:
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


def _blocks(pools: Sequence[PoolInfo]) -> Metric:
    family = GaugeMetricFamily(
        "kvplane_blocks",
        "Blocks by what they are used for; the states of a tier add up to all its blocks.",
        labels=("pool", "tier", "state"),
    )
    for pool in pools:
        for tier in pool.usage:
            states = {
                "free": tier.num_free_blocks,
                "cached": tier.num_cached_blocks,
                "held": tier.num_held_blocks,
                "limbo": tier.num_limbo_blocks,
                "reserved": tier.num_reserved_blocks,
            }
            for state, num_blocks in states.items():
                family.add_metric((pool.pool_id, tier.tier.value, state), num_blocks)
    return family


def _gauge(
    pools: Sequence[PoolInfo], name: str, help: str, value: Callable[[PoolInfo], int]
) -> Metric:
    family = GaugeMetricFamily(name, help, labels=("pool",))
    for pool in pools:
        family.add_metric((pool.pool_id,), value(pool))
    return family


def _counters(pools: Sequence[PoolInfo]) -> Iterator[Metric]:
    for name, help, attribute in (
        ("kvplane_lookup_tokens", "Prompt tokens looked up at admission.", "num_lookup_tokens"),
        ("kvplane_hit_tokens", "Prompt tokens found cached at admission.", "num_hit_tokens"),
        ("kvplane_copies_on_write", "Blocks copied for their writer.", "num_copies_on_write"),
        ("kvplane_evictions", "Published blocks handed out for another use.", "num_evictions"),
        ("kvplane_publications", "Blocks published.", "num_publications"),
    ):
        family = CounterMetricFamily(name, help, labels=("pool",))
        for pool in pools:
            family.add_metric((pool.pool_id,), getattr(pool.counters, attribute))
        yield family
    swapped = CounterMetricFamily(
        "kvplane_swapped_blocks", "Blocks swapped between the tiers.", labels=("pool", "direction")
    )
    for pool in pools:
        swapped.add_metric((pool.pool_id, "out"), pool.counters.num_swapped_out_blocks)
        swapped.add_metric((pool.pool_id, "in"), pool.counters.num_swapped_in_blocks)
    yield swapped
