"""Hit ratios of the eviction policies, through the core: LRU's are exactly those of a model, and
reuse-rate loses next to nothing against it on any kind of traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.replay.__main__ import replay
from benchmarks.replay.traces import Request
from tests.helpers.workloads import WORKLOADS, make_requests

_LOSS_ALLOWED = 0.005  # of all blocks of the prompts


def hits_of_lru(requests: Sequence[Request], capacity_blocks: int) -> int:
    """Of a cache that evicts the prefix that was in use longest ago, the longest first."""
    cached: dict[tuple[int, int], int] = {}  # (number of the prefix before, id) -> number; oldest
    numbers: dict[tuple[int, int], int] = {}  # of all prefixes ever seen
    num_hits = 0
    for _, all_ids in requests:
        number, prompt = 0, []
        for trace_id in all_ids[:capacity_blocks]:
            key = (number, trace_id)
            number = numbers.setdefault(key, len(numbers) + 1)
            prompt.append(key)
        num_found = next((i for i, key in enumerate(prompt) if key not in cached), len(prompt))
        num_hits += num_found
        for key in prompt[:num_found]:  # in use: not to be evicted
            del cached[key]
        while len(cached) + len(prompt) > capacity_blocks:
            del cached[next(iter(cached))]
        for key in reversed(prompt):
            cached[key] = numbers[key]
    return num_hits


def check(name: str, seed: int, num_requests: int | None, capacity_blocks: int) -> None:
    requests = make_requests(name, seed)[:num_requests]
    lru, learned = (
        replay(requests, policy, capacity_blocks)["num_hit_blocks"]
        for policy in ("lru", "reuse-rate")
    )
    assert lru == hits_of_lru(requests, capacity_blocks)
    num_blocks = sum(len(request.ids) for request in requests)
    assert learned >= lru - _LOSS_ALLOWED * num_blocks


@pytest.mark.parametrize("capacity_blocks", [300, pytest.param(1500, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", WORKLOADS)
def test_lru_is_exact_and_reuse_rate_is_nowhere_worse(name: str, capacity_blocks: int) -> None:
    check(name, 1, 800, capacity_blocks)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("name", WORKLOADS)
def test_reuse_rate_is_nowhere_worse_on_long_traffic(name: str, seed: int) -> None:
    for capacity_blocks in (200, 500, 1000, 2000, 5000, 10_000):
        check(name, seed, None, capacity_blocks)


def test_reuse_rate_keeps_hot_prompts_through_a_scan() -> None:
    requests = make_requests("scan", 1)
    lru, learned = (
        replay(requests, policy, 1500)["num_hit_blocks"] for policy in ("lru", "reuse-rate")
    )
    assert learned >= 1.2 * lru
