"""Metrics of the router."""

from __future__ import annotations

from typing import Final

from kvplane.serving.observability.metrics import REQUEST_BUCKETS_S, Declaration, HttpMetrics

from .picker import Pick

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
    REQUEST_BUCKETS_S,
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


class RouterMetrics(HttpMetrics):
    """Metrics of a router."""

    def __init__(self) -> None:
        super().__init__("router", DECLARATIONS)

    def count_sent(self, pick: Pick) -> None:
        """Count a request that goes to the engine that was picked."""
        self[SENT].labels(pick.engine).inc()
        self[PROMPT_TOKENS].inc(pick.num_cached_tokens + pick.num_uncached_tokens)
        self[CACHED_TOKENS].inc(pick.num_cached_tokens)
