"""Metrics of the router."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvplane.router.picker import Pick

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# Name, help, label, and what is read at a scrape: a value of each label.
Reading = tuple[str, str, str, Callable[[], Iterable[tuple[str, float]]]]


class RouterMetrics(Collector):
    """In a registry of their own. ``readings``: gauges that are read at each scrape."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = tuple(readings)
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        self.requests = Counter(
            "kvplane_router_requests_total",
            "Requests that have ended, by HTTP status; 499 where the client went away.",
            ["status"],
            registry=registry,
        )
        self.sent = Counter(
            "kvplane_router_sent_requests_total",
            "Requests sent to an engine, those sent to another one before included.",
            ["engine"],
            registry=registry,
        )
        self.retries = Counter(
            "kvplane_router_retried_requests_total",
            "Requests sent to one engine more, since the one before failed.",
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "kvplane_router_prompt_tokens_total", "Tokens of prompts sent.", registry=registry
        )
        self.cached_tokens = Counter(
            "kvplane_router_cached_prompt_tokens_total",
            "Those that the engine's pool had cached, as far as was known.",
            registry=registry,
        )
        self.first_byte = Histogram(
            "kvplane_router_first_byte_seconds",
            "Time from a stream's request to the first byte of its answer.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.open = Gauge(
            "kvplane_router_open_requests", "Requests that are open.", registry=registry
        )

    def collect(self) -> Iterator[Metric]:
        """The gauges that are read."""
        for name, help, label, read in self._readings:
            family = GaugeMetricFamily(name, help, labels=[label])
            for value_of, value in read():
                family.add_metric([value_of], value)
            yield family

    def count_sent(self, pick: Pick) -> None:
        """A request goes to the engine that was picked."""
        self.sent.labels(pick.engine).inc()
        self.prompt_tokens.inc(pick.num_cached_tokens + pick.num_uncached_tokens)
        self.cached_tokens.inc(pick.num_cached_tokens)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)
