"""Metrics of the HTTP server and the engine behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvplane.serving.observability.metrics import count_in_process

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServingMetrics:
    """Metrics of the HTTP server and its engine. ``num_open``: unanswered requests."""

    def __init__(self, num_open: Callable[[], int]) -> None:
        count_in_process()
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvplane_engine_requests_total",
            "Requests answered, by path and HTTP status; 499 where the client went away.",
            ["path", "status"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "kvplane_engine_prompt_tokens_total", "Tokens of prompts.", registry=registry
        )
        self.cached_tokens = Counter(
            "kvplane_engine_cached_prompt_tokens_total",
            "Tokens of prompts whose keys and values were found cached.",
            registry=registry,
        )
        self.generated_tokens = Counter(
            "kvplane_engine_generated_tokens_total", "Tokens generated.", registry=registry
        )
        self.first_token = Histogram(
            "kvplane_engine_first_token_seconds",
            "Time from a request's arrival to its first token.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.duration = Histogram(
            "kvplane_engine_request_seconds",
            "Time from a request's arrival to its end.",
            registry=registry,
            buckets=_SECONDS,
        )
        gauge = Gauge("kvplane_engine_open_requests", "Requests that are open.", registry=registry)
        gauge.set_function(num_open)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
