"""Metrics of the router."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvplane.serving.observability.metrics import Declaration

from .picker import Pick

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

REQUESTS: Final = Declaration(
    "counter",
    "kvplane_router_requests_total",
    "Requests that have ended, by HTTP status; 499 where the client went away.",
    ("status",),
)
SENT: Final = Declaration(
    "counter",
    "kvplane_router_sent_requests_total",
    "Requests sent to an engine, those sent to another one before included.",
    ("engine",),
)
RETRIES: Final = Declaration(
    "counter",
    "kvplane_router_retried_requests_total",
    "Requests sent to one engine more, since the one before failed.",
)
PROMPT_TOKENS: Final = Declaration(
    "counter", "kvplane_router_prompt_tokens_total", "Tokens of prompts sent."
)
CACHED_TOKENS: Final = Declaration(
    "counter",
    "kvplane_router_cached_prompt_tokens_total",
    "Those that the engine's pool had cached, as far as was known.",
)
FIRST_BYTE: Final = Declaration(
    "histogram",
    "kvplane_router_first_byte_seconds",
    "Time from a stream's request to the first byte of its answer.",
    (),
    _SECONDS,
)
OPEN: Final = Declaration("gauge", "kvplane_router_open_requests", "Requests that are open.")
ENGINE_UP: Final = Declaration(
    "gauge", "kvplane_router_engine_up", "Whether an engine answers.", ("engine",)
)
ENGINE_WAIT: Final = Declaration(
    "gauge",
    "kvplane_router_engine_wait_seconds",
    "Estimated time until an engine has computed all prompts sent to it.",
    ("engine",),
)
ENGINE_RATE: Final = Declaration(
    "gauge",
    "kvplane_router_engine_tokens_per_second",
    "How fast an engine computes prompts, as learnt.",
    ("engine",),
)
POOL_FOLLOWED: Final = Declaration(
    "gauge",
    "kvplane_router_pool_followed",
    "Whether the index of a pool was known in full at some time.",
    ("pool",),
)
POOL_LOST: Final = Declaration(
    "gauge",
    "kvplane_router_pool_lost",
    "Whether the control plane says of a pool that no session can be opened on it.",
    ("pool",),
)
POOL_BLOCKS: Final = Declaration(
    "gauge",
    "kvplane_router_pool_blocks",
    "Blocks that are known to be cached in a pool.",
    ("pool",),
)
DECLARATIONS: Final = (
    *(REQUESTS, SENT, RETRIES, PROMPT_TOKENS, CACHED_TOKENS, FIRST_BYTE, OPEN),
    *(ENGINE_UP, ENGINE_WAIT, ENGINE_RATE, POOL_FOLLOWED, POOL_LOST, POOL_BLOCKS),
)

# A gauge with one label, and its reading at a scrape: a value for each label.
Reading = tuple[Declaration, Callable[[], Iterable[tuple[str, float]]]]


class RouterMetrics(Collector):
    """Metrics in a registry of their own. ``readings``: gauges that are read at each scrape."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = tuple(readings)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.requests = self._counter(REQUESTS)
        self.sent = self._counter(SENT)
        self.retries = self._counter(RETRIES)
        self.prompt_tokens = self._counter(PROMPT_TOKENS)
        self.cached_tokens = self._counter(CACHED_TOKENS)
        self.first_byte = Histogram(
            FIRST_BYTE.name, FIRST_BYTE.help, buckets=FIRST_BYTE.buckets, registry=self._registry
        )
        self.open = Gauge(OPEN.name, OPEN.help, registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges that are read."""
        for declaration, read in self._readings:
            family = GaugeMetricFamily(
                declaration.name, declaration.help, labels=declaration.labels
            )
            for value_of, value in read():
                family.add_metric([value_of], value)
            yield family

    def count_sent(self, pick: Pick) -> None:
        """Count a request that goes to the engine that was picked."""
        self.sent.labels(pick.engine).inc()
        self.prompt_tokens.inc(pick.num_cached_tokens + pick.num_uncached_tokens)
        self.cached_tokens.inc(pick.num_cached_tokens)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, declaration: Declaration) -> Counter:
        return Counter(
            declaration.name, declaration.help, declaration.labels, registry=self._registry
        )
