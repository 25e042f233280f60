"""What a pool of shards says of itself while it comes together, and what it counts."""

from __future__ import annotations

from registration_messages import LAYOUT, half, hello, report

from control_plane.planning.pools.shards import PoolShards, ShardState
from kvplane.v1 import types_pb2 as tpb


def joined(shards: PoolShards, index: int, **fields: int) -> ShardState:
    return shards.add(hello(shard=half(index), epoch=10 + index, **fields))


def test_it_says_what_is_missing_until_nothing_is() -> None:
    shards = PoolShards(2, LAYOUT, bytes(32))
    assert "shards 0, 1 of 2 have not registered" in shards.what_is_missing()
    left = joined(shards, 0)
    assert "shards 1 of 2 have not registered" in shards.what_is_missing()
    right = joined(shards, 1)
    assert "shards 0, 1 have not reported" in shards.what_is_missing()
    for state in (left, right):
        assert not shards.are_complete
        state.add_report(report())
    assert shards.are_complete
    right.disconnect()
    assert "shards 1 have lost their connection" in shards.what_is_missing()
    right.reconnect(right.hello, [])
    shards.fence(tpb.SessionRef(session_id=5), ordinal=1)
    assert "stopping sessions" in shards.what_is_missing()
    assert not shards.fence_done(5, 0)
    assert shards.fence_done(5, 1)
    assert not shards.fence_done(5, 1)


def test_sessions_are_counted_from_one_for_each_key() -> None:
    shards = PoolShards(1, LAYOUT, bytes(32))
    assert [shards.next_ordinal() for _ in range(3)] == [1, 2, 3]
    before = shards.key_id
    shards.start_over(1, LAYOUT, b"k" * 32)
    assert shards.next_ordinal() == 1
    assert shards.key_id != before


def test_layers_that_a_group_does_not_have_are_no_part_of_a_shard() -> None:
    """Layers 0 and 1 are the layout's; what a range holds beside them does not overlap."""
    shards = PoolShards(2, LAYOUT, bytes(32))
    joined(shards, 0)
    other = half(1)
    assert shards.overlapping(other) == []
    other.first_kv_head = 0
    assert shards.overlapping(other) == [0]
    other.first_layer = 2
    assert shards.overlapping(other) == []
