"""Metrics of a plane: declared once, counted in plain Python, written for Prometheus at a scrape.

    declarations ──► docs/reference/metrics.md
         └────────► Counts and Histograms, which one thread changes ─┐
         └────────► values read at a scrape ─────────────────────────┴─► Samples ──► /metrics

A label takes few values, which the program knows: tiers, reasons, methods. Ids of 64 bits are
labels of an info metric, since a sample is a float and cannot hold them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client import Histogram as ClientHistogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvplane.errors import REASONS
from kvplane.release import release
from kvplane.serving.limits.receive_budget import ReceiveBudget
from kvplane.serving.observability.histogram import Histogram

# From an empty call on loopback to the slowest call that anybody would wait for.
LATENCY_BUCKETS_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
REQUEST_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)


@dataclass(frozen=True, eq=False)
class Declaration:
    """Declares a metric. ``help``: a sentence that gives the unit if the name does not.
    ``buckets``: upper bounds, if it is a histogram.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


BUILD: Final = Declaration(
    "gauge", "kvplane_build_info", "1, with what this process runs.", ("plane", "version", "python")
)
RPC_HANDLED: Final = Declaration(
    "counter",
    "kvplane_rpc_handled_total",
    "RPCs that have ended, by status code. A stream counts once.",
    ("method", "code"),
)
RPC_DURATION: Final = Declaration(
    "histogram",
    "kvplane_rpc_duration_seconds",
    "Time from an RPC's arrival to its end; unary calls only.",
    ("method",),
    LATENCY_BUCKETS_S,
)
REJECTIONS: Final = Declaration(
    "counter",
    "kvplane_rejections_total",
    "Requests refused with an error, unary or in a stream, by the error's reason.",
    ("reason",),
)
LOOP_LAG: Final = Declaration(
    "histogram",
    "kvplane_event_loop_lag_seconds",
    "How late a timer of the event loop was; it is set ten times a second.",
    (),
    LATENCY_BUCKETS_S,
)
RECEIVED: Final = Declaration(
    "gauge",
    "kvplane_received_bytes",
    "Requests that were received and are not answered yet.",
)
CERTIFICATE_ENDS: Final = Declaration(
    "gauge",
    "kvplane_certificate_ends_timestamp_seconds",
    "When the certificate in use expires, in Unix time; absent without TLS.",
)
SHARED: Final = (
    *(BUILD, RPC_HANDLED, RPC_DURATION, REJECTIONS, LOOP_LAG, RECEIVED),
    CERTIFICATE_ENDS,
)


class Counts:
    """Counters by labels. One thread changes them."""

    def __init__(self, first: Iterable[str] = ()) -> None:
        """``first``: values of the only label that are reported as 0 before they occur, so that the
        first occurrence is an increase.
        """
        self.values: dict[tuple[str, ...], float] = {(label,): 0 for label in first}

    def inc(self, *labels: str, by: float = 1) -> None:
        """Add ``by`` to the counter of these labels."""
        self.values[labels] = self.values.get(labels, 0) + by


class Histograms:
    """Histograms by labels. One thread adds to them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.values: dict[tuple[str, ...], Histogram] = {}

    def add(self, value: float, *labels: str) -> None:
        """Count ``value`` in the histogram of these labels."""
        histogram = self.values.get(labels)
        if histogram is None:
            histogram = self.values[labels] = Histogram(self._bounds)
        histogram.add(value)


class Samples:
    """Collects the samples of one scrape."""

    def __init__(self, declarations: Iterable[Declaration], constant: Mapping[str, str]) -> None:
        """``constant``: labels that all samples get."""
        self._constant = dict(constant)
        self._metrics = {d: Metric(_family(d), d.help, d.kind) for d in declarations}

    def add(self, declaration: Declaration, value: float, *labels: str) -> None:
        """Add a counter's or a gauge's value; ``labels`` in the order of the declaration."""
        metric = self._metrics[declaration]
        metric.add_sample(declaration.name, self._labels(declaration, labels), value)

    def add_counts(self, declaration: Declaration, counts: Counts) -> None:
        """Add a sample for each counter of ``counts``."""
        for labels, value in [*counts.values.items()]:
            self.add(declaration, value, *labels)

    def add_histogram(self, declaration: Declaration, histogram: Histogram, *labels: str) -> None:
        """Add a histogram, whose bounds are the declaration's buckets."""
        metric, name = self._metrics[declaration], declaration.name
        named = self._labels(declaration, labels)
        total = 0
        bounds = [*map(str, declaration.buckets), "+Inf"]
        for bound, count in zip(bounds, [*histogram.counts], strict=True):
            total += count
            metric.add_sample(f"{name}_bucket", {**named, "le": bound}, total)
        metric.add_sample(f"{name}_count", named, total)
        metric.add_sample(f"{name}_sum", named, histogram.sum)

    def add_histograms(self, declaration: Declaration, histograms: Histograms) -> None:
        """Add a sample for each histogram of ``histograms``."""
        for labels, histogram in [*histograms.values.items()]:
            self.add_histogram(declaration, histogram, *labels)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics that have samples, in the order of their declarations."""
        return (metric for metric in self._metrics.values() if metric.samples)

    def _labels(self, declaration: Declaration, values: tuple[str, ...]) -> dict[str, str]:
        return {**self._constant, **dict(zip(declaration.labels, values, strict=True))}


class RpcMetrics:
    """Counters of answered calls, which the event loop changes."""

    def __init__(self) -> None:
        self.handled = Counts()
        self.duration = Histograms(LATENCY_BUCKETS_S)
        self.rejected = Counts(REASONS)
        self.received = ReceiveBudget()


class PlaneMetrics(Collector):
    """The metrics of one server, in a registry of their own, with those of its process.

    A plane adds its own declarations, and overrides ``read``.
    """

    def __init__(
        self,
        plane: str,
        declarations: Iterable[Declaration],
        constant: Mapping[str, str] | None = None,
    ) -> None:
        """``constant``: labels that all samples of the plane get."""
        self.registry = CollectorRegistry()
        self.rpc = RpcMetrics()
        self.loop_lag = Histogram(LATENCY_BUCKETS_S)
        self.certificate_ends_s: Callable[[], float] | None = None
        self._plane = plane
        self._declarations = (*SHARED, *declarations)
        self._constant = constant or {}
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def read(self, samples: Samples) -> None:
        """Add the plane's own samples. Called on the thread of a scrape."""

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for prometheus_client."""
        samples = Samples(self._declarations, self._constant)
        samples.add(BUILD, 1, self._plane, release(), platform.python_version())
        samples.add_counts(RPC_HANDLED, self.rpc.handled)
        samples.add_histograms(RPC_DURATION, self.rpc.duration)
        samples.add_counts(REJECTIONS, self.rpc.rejected)
        samples.add_histogram(LOOP_LAG, self.loop_lag)
        samples.add(RECEIVED, self.rpc.received.num_bytes)
        if self.certificate_ends_s is not None:
            samples.add(CERTIFICATE_ENDS, self.certificate_ends_s())
        self.read(samples)
        return samples.metrics()


class HttpMetrics:
    """Metrics of an HTTP program and of its process, in a registry of their own. Each is that of
    ``prometheus_client``, by declaration.
    """

    def __init__(self, program: str, declarations: Iterable[Declaration]) -> None:
        # Counters stay in this process: the folder PROMETHEUS_MULTIPROC_DIR is for servers of many
        # processes, and may be another's.
        values.ValueClass = values.MutexValue
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._metrics = {each: self._metric(each) for each in (BUILD, *declarations)}
        self[BUILD].labels(program, release(), platform.python_version()).set(1)

    def _metric(self, declaration: Declaration) -> Any:
        kinds: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": ClientHistogram}
        kind, name, labels = declaration.kind, declaration.name, declaration.labels
        more = {"buckets": declaration.buckets} if declaration.buckets else {}
        return kinds[kind](name, declaration.help, labels, registry=self.registry, **more)

    def __getitem__(self, declaration: Declaration) -> Any:
        return self._metrics[declaration]

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _family(declaration: Declaration) -> str:
    """Return a metric's name without the suffix that prometheus_client adds."""
    is_counter = declaration.kind == "counter"
    return declaration.name.removesuffix("_total") if is_counter else declaration.name
