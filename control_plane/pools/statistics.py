"""Counts of a pool for metrics, beyond those of its native core."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from kvplane_blocks import duration_bounds_s

from control_plane.pools.reports import TIERS
from kvplane.serving.observability.histogram import Histogram
from kvplane.wire.v1 import types_pb2 as tpb

# From an append of one token to a prompt of a million.
ALLOCATION_BOUNDS_S: Final = (
    *(0.000005, 0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
)
# From a fence on loopback, or the queue's next grant, to waits that an operator looks into.
WAIT_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
DURATION_BOUNDS_S: Final = tuple(duration_bounds_s())
# In the order of the native core.
EVICTION_REASONS: Final = ("policy", "retained", "own")
_TIMES: Final = ("lifetime", "idle", "reuse_gap")


class PoolCounters(NamedTuple):
    """Counters of a pool's native cores since the pool registered, in the cores' order. The fields
    are explained where they are declared as metrics (``control_plane/server/metrics.py``).
    """

    num_lookup_tokens: int
    num_hit_tokens: int
    num_copies_on_write: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_evictions: int
    num_publications: int
    max_held_blocks: int
    num_host_hit_tokens: int
    num_demoted_blocks: int
    num_forgotten_blocks: int


@dataclass(slots=True)
class PoolStatistics:
    """Counters and histograms of a pool since it registered first. ``reclaimed_blocks``: of ended
    sessions, by why they ended. ``allocation_s``: by operation. ``fence_s``: from a session's end
    until it is fenced. ``wait_s``: of admissions in the queue until they are granted. ``reread_*``:
    tokens looked up and found by admissions of sequences that had been cut.
    """

    num_expired_sessions: int = 0
    num_aborts: int = 0
    num_resyncs: int = 0
    num_epoch_changes: int = 0
    num_granted_admissions: int = 0
    reread_lookup_tokens: int = 0
    reread_hit_tokens: int = 0
    cut_sequences: Counter[str] = field(default_factory=Counter)
    reclaimed_blocks: Counter[str] = field(default_factory=Counter)
    allocation_s: defaultdict[str, Histogram] = field(
        default_factory=partial(defaultdict, partial(Histogram, ALLOCATION_BOUNDS_S))
    )
    fence_s: Histogram = field(default_factory=partial(Histogram, WAIT_BOUNDS_S))
    wait_s: Histogram = field(default_factory=partial(Histogram, WAIT_BOUNDS_S))


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Evictions of one tier's blocks, and histograms of their times. ``num_evictions``: by reason.
    ``lifetime``, ``idle``, ``reuse_gap``: in seconds; see ``csrc/blocks/core/block_times.h``.
    """

    num_evictions: dict[str, int]
    lifetime: Histogram
    idle: Histogram
    reuse_gap: Histogram


def read_block_times(values: list[float]) -> dict[tpb.Tier, BlockTimes]:
    """Convert ``block_times`` of the native core, or sums of several, to BlockTimes by tier."""
    numbers = iter(values)
    times = {}
    for tier in TIERS:
        evictions = {reason: int(next(numbers)) for reason in EVICTION_REASONS}
        histograms = {}
        for name in _TIMES:
            histograms[name] = histogram = Histogram(DURATION_BOUNDS_S)
            histogram.counts = [int(next(numbers)) for _ in histogram.counts]
            histogram.sum = next(numbers)
        times[tier] = BlockTimes(evictions, **histograms)
    return times
