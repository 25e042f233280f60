"""Metrics of the HTTP server and the engine behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvplane.serving.observability.metrics import REQUEST_BUCKETS_S, Declaration, HttpMetrics

REQUESTS: Final = Declaration(
    "counter",
    "kvplane_engine_requests_total",
    "Requests answered, by path and HTTP status; 499 where the client went away.",
    ("path", "status"),
)
PROMPT_TOKENS: Final = Declaration(
    "counter", "kvplane_engine_prompt_tokens_total", "Tokens of prompts."
)
CACHED_TOKENS: Final = Declaration(
    "counter",
    "kvplane_engine_cached_prompt_tokens_total",
    "Tokens of prompts whose keys and values were found cached.",
)
GENERATED_TOKENS: Final = Declaration(
    "counter", "kvplane_engine_generated_tokens_total", "Tokens generated."
)
FIRST_TOKEN: Final = Declaration(
    "histogram",
    "kvplane_engine_first_token_seconds",
    "Time from a request's arrival to its first token.",
    (),
    REQUEST_BUCKETS_S,
)
DURATION: Final = Declaration(
    "histogram",
    "kvplane_engine_request_seconds",
    "Time from a request's arrival to its end.",
    (),
    REQUEST_BUCKETS_S,
)
OPEN: Final = Declaration("gauge", "kvplane_engine_open_requests", "Requests that are open.")
DECLARATIONS: Final = tuple(value for value in vars().values() if type(value) is Declaration)


class ServingMetrics(HttpMetrics):
    """Metrics of the HTTP server and its engine. ``num_open``: unanswered requests."""

    def __init__(self, num_open: Callable[[], int]) -> None:
        super().__init__("engine", DECLARATIONS)
        self[OPEN].set_function(num_open)
