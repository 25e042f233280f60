"""Tests which engine a prompt goes to."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from simulated_fleet import Fleet

from kvplane.integrations.router.picker import Picker
from kvplane.integrations.router.pool_index import PoolIndex
from kvplane.prefixes import BlocksStored, StoredBlock
from tests.helpers.workloads import make_requests

PROMPT = list(range(1, 10))


def picker(*, needs_pools: bool = True, **pool_of: str) -> Picker:
    """Make engines at 4 tokens a second. Pool "warm" has the first 8 tokens of the prompt."""
    made = Picker(pool_of, hit_bias=1.0, tokens_per_s=4.0, needs_pools=needs_pools)
    for pool in {*pool_of.values()}:
        made.indexes[pool] = PoolIndex(4)
    if "warm" in made.indexes:
        blocks = [
            StoredBlock(
                bytes([i + 1]) * 16, bytes([i]) * 16, array("i", PROMPT[4 * i : 4 * i + 4]), 1
            )
            for i in range(2)
        ]
        made.indexes["warm"].apply(BlocksStored(tuple(blocks)))
    return made


def test_it_picks_the_engine_that_has_less_to_compute() -> None:
    pick = picker(a="cold", b="warm").pick([PROMPT], 0.0)
    assert pick is not None
    assert (pick.engine, pick.num_cached_tokens, pick.num_uncached_tokens) == ("b", 8, 1)
    assert pick.cost_s == pytest.approx(0.25)


def test_a_hit_is_worth_waiting_for_only_so_long() -> None:
    engines = picker(a="cold", b="warm")
    engines.loads["b"].sent(100, 12, 0.0, is_told=True)  # 3 s, of which half count
    assert [engines.pick([PROMPT], 0.0).engine, engines.pick([PROMPT[::-1]], 0.0).engine] == [
        "b",
        "a",
    ]  # type: ignore[union-attr]
    engines.loads["b"].sent(101, 8, 0.0, is_told=True)
    assert engines.pick([PROMPT], 0.0).engine == "a"  # type: ignore[union-attr]


def test_equal_engines_share_the_requests() -> None:
    engines = picker(a="warm", b="warm", c="warm")
    picked: Counter[str] = Counter()
    for _ in range(30):
        pick = engines.pick([PROMPT], 0.0)
        assert pick is not None
        picked[pick.engine] += 1
        engines.loads[pick.engine].num_open += 1
    assert set(picked.values()) == {10}


def test_all_prompts_of_a_request_count() -> None:
    pick = picker(a="warm").pick([PROMPT, PROMPT[:5], [7]], 0.0, num_unread_tokens=10)
    assert pick is not None
    assert (pick.num_cached_tokens, pick.num_uncached_tokens) == (12, 13)


def test_engines_that_are_ruled_out_are_not_picked() -> None:
    engines = picker(a="cold", b="warm")
    pick = engines.pick([PROMPT], 0.0, among={"a"})
    assert pick is not None
    assert pick.engine == "a"
    assert engines.pick([PROMPT], 0.0, among=set()) is None


def test_engines_of_lost_pools_are_picked_last() -> None:
    """Engine "a" is idle because it can do nothing, and has the prompt cached."""
    engines = picker(a="cold", b="warm")
    engines.lost.add("warm")
    engines.loads["a"].sent(100, 400, 0.0, is_told=True)
    assert engines.pick([PROMPT], 0.0).engine == "a"  # type: ignore[union-attr]
    assert engines.pick([PROMPT], 0.0, among={"b"}).engine == "b"  # type: ignore[union-attr]
    engines.lost.add("cold")
    assert engines.pick([PROMPT], 0.0).engine == "b"  # type: ignore[union-attr]


def test_engines_that_answer_without_their_pool_are_picked_as_if_it_were_empty() -> None:
    engines = picker(needs_pools=False, a="cold", b="warm")
    engines.lost.add("warm")
    engines.loads["a"].sent(100, 4, 0.0, is_told=True)
    pick = engines.pick([PROMPT], 0.0)
    assert pick is not None
    assert (pick.engine, pick.num_cached_tokens) == ("b", 0)


def test_a_pool_that_nothing_is_known_of_counts_as_empty() -> None:
    engines = Picker({"a": "unknown"}, tokens_per_s=4.0)
    pick = engines.pick([PROMPT], 0.0)
    assert pick is not None
    assert pick.num_cached_tokens == 0


def test_seconds_beat_turns_and_the_longest_prefix_collapses() -> None:
    requests = make_requests("chat", 5)[:350]
    for request in requests:
        request.ids.insert(0, -1)  # every prompt begins with the same block

    def measured(policy: str) -> tuple[float, float, float]:
        """The hit ratio, the mean time to a first token, and unevenness of the requests."""
        fleet = Fleet(policy, num_engines=4, capacity_blocks=400)
        outcomes = [fleet.send(request) for request in requests]
        num_blocks = sum(outcome.num_blocks for outcome in outcomes)
        most = max(Counter(outcome.engine for outcome in outcomes).values())
        return (
            sum(outcome.num_hits for outcome in outcomes) / num_blocks,
            sum(outcome.first_token_s for outcome in outcomes) / len(outcomes),
            4 * most / len(outcomes),
        )

    hits, first_token_s, unevenness = measured("seconds")
    hits_by_turns, first_token_by_turns_s, _ = measured("round-robin")
    _, first_token_by_length_s, unevenness_by_length = measured("longest-prefix")
    assert hits > 1.2 * hits_by_turns
    assert first_token_s < 0.95 * first_token_by_turns_s
    assert unevenness < 2.0
    assert unevenness_by_length == 4.0
    assert first_token_by_length_s > 10 * first_token_s
