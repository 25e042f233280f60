"""Every metric of the control plane that is not one of all servers; docs/metrics.md lists them."""

from __future__ import annotations

from typing import Final

from control_plane.pools.statistics import (
    ALLOCATION_BOUNDS_S,
    DURATION_BOUNDS_S,
    WAIT_BOUNDS_S,
)
from kvplane.serving.observability.metrics import LATENCY_BUCKETS_S, Declaration


def _gauge(name: str, help: str, *labels: str) -> Declaration:
    return Declaration("gauge", f"kvplane_{name}", help, ("pool", *labels))


def _counter(name: str, help: str, *labels: str) -> Declaration:
    return Declaration("counter", f"kvplane_{name}_total", help, ("pool", *labels))


def _histogram(name: str, help: str, bounds: tuple[float, ...], *labels: str) -> Declaration:
    return Declaration("histogram", f"kvplane_{name}_seconds", help, ("pool", *labels), bounds)


RUN: Final = Declaration(
    "gauge", "kvplane_control_plane_info", "1, with this run's incarnation.", ("incarnation",)
)
LEADS: Final = Declaration(
    "gauge", "kvplane_control_plane_leads", "1 while this process serves, 0 while it stands by.", ()
)
BLOCKS: Final = _gauge(
    "blocks",
    "Blocks by what they are used for; the states of a tier add up to all its blocks.",
    "tier",
    "state",
)
PEAK_HELD: Final = _gauge("max_held_blocks", "The most device blocks ever held at one time.")
SESSIONS: Final = _gauge("sessions", "Open sessions.")
SEQUENCES: Final = _gauge(
    "sequences",
    "Sequences: live ones by tier, and admissions and swap-ins that wait in the line.",
    "state",
)
POOL_READY: Final = _gauge("pool_ready", "1 when sessions can be opened.")
SHARDS: Final = _gauge("pool_shards", "Shards that the pool has when all are registered.")
REGISTERED: Final = _gauge("registered_shards", "Data planes whose registration stream is open.")
HEARTBEAT_AGE: Final = _gauge(
    "heartbeat_age_seconds", "Time since a data plane's last message.", "shard"
)
PLANS_IN_FLIGHT: Final = _gauge("plans_in_flight", "Plans made and not yet receipted.")
OLDEST_PLAN: Final = _gauge(
    "oldest_plan_age_seconds", "Age of the plan that waits longest for its receipt; 0 for none."
)
MISSING_RECEIPTS: Final = _gauge(
    "missing_receipts",
    "Plans that another shard of the pool has receipted and this one has not.",
    "shard",
)
OLDEST_RETIRED: Final = _gauge(
    "oldest_retired_age_seconds",
    "How long the blocks have been retired that have been so longest; 0 for none.",
)
FOLLOWERS: Final = _gauge("followers", "Streams that follow the prefix index.")

OPERATIONS: Final = Declaration(
    "counter",
    "kvplane_operations_total",
    "Items of operations answered: an append, fork or free has one for each sequence.",
    ("operation", "status"),
)
REFUSED_ITEMS: Final = Declaration(
    "counter",
    "kvplane_refused_items_total",
    "Of these, items that were not done: LATER and NEVER by what is in the way, FAILED by the "
    "error's reason.",
    ("operation", "status", "reason"),
)
PLANS: Final = Declaration("counter", "kvplane_plans_total", "Plans sent.")
STEP_DURATION: Final = Declaration(
    "histogram",
    "kvplane_step_duration_seconds",
    "Time that a step takes inside the control plane.",
    (),
    LATENCY_BUCKETS_S,
)
ALLOCATION_DURATION: Final = _histogram(
    "allocation_duration",
    "Time that one operation of a step takes in the core, all its items together.",
    ALLOCATION_BOUNDS_S,
    "operation",
)
ADMISSION_WAIT: Final = _histogram(
    "admission_wait", "Time that granted admissions waited in the line.", WAIT_BOUNDS_S
)
FENCE_DURATION: Final = _histogram(
    "fence_duration",
    "Time from a session's end until every data plane has fenced it.",
    WAIT_BOUNDS_S,
)
BLOCK_LIFETIME: Final = _histogram(
    "block_lifetime", "Time from a block's publication to its eviction.", DURATION_BOUNDS_S, "tier"
)
BLOCK_IDLE: Final = _histogram(
    "block_idle_before_eviction",
    "Time from the last admission that found a block, or its publication, to its eviction.",
    DURATION_BOUNDS_S,
    "tier",
)
REUSE_GAP: Final = _histogram(
    "block_reuse_gap",
    "Time between two admissions that found a block, or its publication and the first.",
    DURATION_BOUNDS_S,
    "tier",
)

LOOKUP_TOKENS: Final = _counter("lookup_tokens", "Prompt tokens looked up at admission.")
HIT_TOKENS: Final = _counter("hit_tokens", "Of these, tokens found cached.", "tier")
REREAD_LOOKUP: Final = _counter(
    "reread_lookup_tokens",
    "Of the tokens looked up, those of sequences that were admitted again after they were cut.",
)
REREAD_HIT: Final = _counter("reread_hit_tokens", "Of these, tokens found cached.")
EVICTIONS: Final = _counter(
    "evictions",
    "Published blocks allocated for another use: the eviction policy's next (policy), a retained "
    "one when nothing else was left (retained), or one that its session released and took back "
    "before a receipt (own).",
    "tier",
    "reason",
)
DEMOTED: Final = _counter(
    "demoted_blocks", "Published blocks moved to the host tier where they would have been evicted."
)
PUBLICATIONS: Final = _counter("publications", "Blocks published.")
FORGOTTEN: Final = _counter("forgotten_blocks", "Published blocks forgotten.")
INDEX_CHANGES: Final = _counter("index_changes", "Changes of the prefix index: its revision.")
COPIES: Final = _counter("copies_on_write", "Blocks copied for their writer.")
SWAPPED: Final = _counter("swapped_blocks", "Blocks swapped between the tiers.", "direction")
GRANTED: Final = _counter(
    "granted_admissions", "Admissions that waited in the line and were granted."
)
CUT: Final = _counter(
    "cut_sequences",
    "Sequences cut: for those that grow, at the end of a turn, or because they did nothing.",
    "reason",
)
EXPIRED: Final = _counter("sessions_expired", "Sessions whose lease ran out.")
RECLAIMED: Final = _counter(
    "reclaimed_blocks",
    "Blocks in the tables of sessions when they ended: closed, expired, a shard's new epoch, or a "
    "receipt that a shard did not give.",
    "cause",
)
ABORTS: Final = _counter("aborts", "Plans aborted by request.")
RESYNCS: Final = _counter("resyncs", "Sessions that asked for all tables again.")
EPOCH_CHANGES: Final = _counter(
    "epoch_changes", "Data planes that came back as another process: the pool's sessions end."
)

DECLARATIONS: Final = tuple(value for value in vars().values() if type(value) is Declaration)
