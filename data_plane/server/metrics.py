"""All metrics of the data plane. The executor's counters are read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from data_plane.executor import Executor
from data_plane.kernels.cpu import cpu_isa
from data_plane.memory.pool import TIER_NAMES
from data_plane.places import group_of, tier_of
from kvplane.serving.metrics import LATENCY_BUCKETS_S, RpcMetrics

_DIRECTIONS = ("copy", "swap_out", "swap_in")


class DataPlaneMetrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.registered = Gauge(
            "kvplane_registered",
            "1 while registered with a control plane.",
            registry=self.registry,
        )
        Gauge(
            "kvplane_kernel_isa",
            "1 for the instruction set of the CPU kernels, which a pool on a GPU uses only to read "
            "its host tier.",
            ["isa"],
            registry=self.registry,
        ).labels(cpu_isa()).set(1)
        self._command_duration = Histogram(
            "kvplane_command_duration_seconds",
            "Time that the executor takes for a command, waiting for the device included.",
            ["command"],
            registry=self.registry,
            buckets=LATENCY_BUCKETS_S,
        )

    def observe_command(self, name: str, duration_s: float) -> None:
        """Count one command of the executor."""
        self._command_duration.labels(name).observe(duration_s)

    def watch(self, executor: Executor) -> None:
        """Export the executor's state and counters."""
        self.registry.register(_ExecutorCollector(executor))


class _ExecutorCollector(Collector):
    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def collect(self) -> Iterator[Metric]:
        yield self._backend()
        yield from self._gauges()
        yield from self._counters()

    def _backend(self) -> Metric:
        backend = GaugeMetricFamily(
            "kvplane_kernel_backend",
            "1 for the kernels that plans run on, and their device.",
            labels=("backend", "device"),
        )
        backend.add_metric((self._executor.kernels.backend, str(self._executor.device)), 1)
        return backend

    def _gauges(self) -> Iterator[Metric]:
        executor = self._executor
        for name, help, value in (
            ("kvplane_open_sessions", "Open sessions.", executor.num_sessions),
            ("kvplane_block_tables", "Block tables of all sessions.", executor.num_sequences),
            (
                "kvplane_published_blocks",
                "Device blocks that hold a published prefix.",
                executor.num_published_blocks,
            ),
            ("kvplane_epoch", "The epoch of this process.", executor.epoch),
        ):
            yield GaugeMetricFamily(name, help, value=value)
        groups = executor.layout.groups
        names = ("tier", "group")[: min(2, len(groups))]
        blocks = GaugeMetricFamily("kvplane_pool_blocks", "Blocks of a tier.", labels=names)
        size = GaugeMetricFamily("kvplane_pool_bytes", "Bytes of a tier.", labels=names)
        num_bytes = executor.pools.num_bytes
        for place, num_blocks in executor.pools.num_blocks.items():
            labels = (TIER_NAMES[tier_of(place)], groups[group_of(place)].name)[: len(names)]
            blocks.add_metric(labels, num_blocks)
            size.add_metric(labels, num_bytes[place])
        yield blocks
        yield size

    def _counters(self) -> Iterator[Metric]:
        counters = self._executor.counters
        for name, help, value in (
            ("kvplane_plans_started", "Plans started.", counters.num_plans_started),
            ("kvplane_plans_run", "Plans run to their end.", counters.num_plans_run),
            (
                "kvplane_written_tokens",
                "Tokens written, counted once per layer.",
                counters.num_written_tokens,
            ),
            (
                "kvplane_attention_tokens",
                "Query tokens whose attention was computed, counted once per layer.",
                counters.num_attention_tokens,
            ),
            (
                "kvplane_cleared_blocks",
                "Blocks zeroed before another tenant got them.",
                counters.num_cleared_blocks,
            ),
        ):
            yield CounterMetricFamily(name, help, value=value)
        size = CounterMetricFamily(
            "kvplane_transferred_bytes", "Bytes copied and swapped.", labels=("direction",)
        )
        blocks = CounterMetricFamily(
            "kvplane_transferred_blocks", "Blocks copied and swapped.", labels=("direction",)
        )
        for direction in _DIRECTIONS:
            size.add_metric((direction,), counters.transfer_bytes[direction])
            blocks.add_metric((direction,), counters.num_transferred_blocks[direction])
        yield size
        yield blocks
        rejections = CounterMetricFamily(
            "kvplane_rejections", "Commands refused.", labels=("reason",)
        )
        for reason, count in dict(counters.num_rejections).items():
            rejections.add_metric((reason,), count)
        yield rejections
