"""The order of eviction: least recently used first."""

from __future__ import annotations

from control_plane.blocks.eviction import LeastRecentlyUsed


def test_the_block_that_became_cached_or_was_touched_longest_ago_goes_first() -> None:
    policy = LeastRecentlyUsed()
    for block in (3, 1, 2, 5):
        policy.add(block)
    policy.touch(3)
    policy.remove(2)
    assert list(policy) == [1, 5, 3]
    assert [policy.pop() for _ in range(len(policy))] == [1, 5, 3]
