"""What a pool of shards says of itself while it comes together, and what it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.pools.shards import EndedSession, PoolShards, ShardState
from kvplane.errors import InvalidRequestError
from kvplane.layout import LayerGroup
from kvplane.shard import QueryHeads, Shard
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.registration_messages import LAYOUT, half, hello, report


def joined(shards: PoolShards, index: int, **fields: int) -> ShardState:
    return shards.add(hello(shard=half(index), epoch=10 + index, **fields))


def test_it_says_what_is_missing_until_nothing_is() -> None:
    shards = PoolShards(2, LAYOUT)
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
    ended = shards.ended[5] = EndedSession(
        tpb.SessionRef(session_id=5),
        ordinal=1,
        tenant="ann",
        handle=1,
        ended_s=0.0,
        unfenced_shards={0, 1},
        is_released=False,
        lacks_receipt=False,
    )
    assert "shards 0, 1 have not stopped sessions" in shards.what_is_missing()
    ended.unfenced_shards.remove(0)
    assert shards.is_fencing
    assert [len(shards.fences_for(i)) for i in (0, 1)] == [0, 1]
    ended.unfenced_shards.remove(1)
    assert not shards.is_fencing
    assert "still being built" in shards.what_is_missing()


def test_sessions_are_counted_from_one_for_each_key() -> None:
    shards = PoolShards(1, LAYOUT)
    assert [shards.next_ordinal() for _ in range(3)] == [1, 2, 3]
    before = shards.key
    shards.start_over(1, LAYOUT)
    assert shards.next_ordinal() == 1
    assert shards.key != before


def test_layers_that_a_group_does_not_have_are_no_part_of_a_shard() -> None:
    """Layers 0 and 1 are the layout's; what a range holds beside them does not overlap."""
    shards = PoolShards(2, LAYOUT)
    joined(shards, 0)
    other = half(1)
    assert shards.overlapping(other) == []
    other.first_kv_head = 0
    assert shards.overlapping(other) == [0]
    other.first_layer = 2
    assert shards.overlapping(other) == []


def test_copies_of_a_part_do_not_overlap_and_are_numbered_without_gaps() -> None:
    shards = PoolShards(3, LAYOUT)
    first, second = half(0, 3), half(1, 3)
    shards.add(hello(shard=first))
    second.copy = 1
    shards.add(hello(shard=second))
    first.index, first.copy = 2, 0
    assert shards.overlapping(first) == [0]
    first.copy = 1
    assert shards.overlapping(first) == []
    shards.add(hello(shard=first))
    for state in shards.states.values():
        state.add_report(report())
    assert not shards.are_complete  # nobody is copy 0 of the second half
    assert "do not hold every KV head" in shards.what_is_missing()
    second.copy = 0
    shards.add(hello(shard=second)).add_report(report())
    assert shards.are_complete


def test_heads_are_divided_evenly_or_copied() -> None:
    layout = replace(LAYOUT, groups=(LayerGroup("full", (0, 1), 4, 8),))

    def held(num_shards: int) -> list[tuple[int, int, int]]:
        shards = [Shard.of_heads(layout, i, num_shards) for i in range(num_shards)]
        return [(shard.first_kv_head, shard.num_kv_heads, shard.copy) for shard in shards]

    assert held(1) == [(0, 4, 0)]
    assert held(2) == [(0, 2, 0), (2, 2, 0)]
    assert held(8) == [(i // 2, 1, i % 2) for i in range(8)]
    for num_shards in (0, 3, 6):
        with pytest.raises(InvalidRequestError, match="num_shards"):
            Shard.of_heads(layout, 0, num_shards)


@pytest.mark.parametrize(
    ("num_kv_heads", "num_shards", "num_heads", "expected"),
    [
        (2, 1, 6, [[range(6)]]),
        (2, 2, 6, [[range(3)], [range(3, 6)]]),
        (2, 4, 6, [[range(1)], [range(1, 3)], [range(3, 4)], [range(4, 6)]]),
    ],
)
def test_copies_divide_the_query_heads(num_kv_heads, num_shards, num_heads, expected) -> None:
    layout = replace(LAYOUT, groups=(LayerGroup("full", (0, 1), num_kv_heads, 8),))
    shards = [Shard.of_heads(layout, i, num_shards) for i in range(num_shards)]
    assert [QueryHeads.of(x, shards, layout, 0).ranges(num_heads) for x in shards] == expected


def test_a_copy_without_query_heads_is_refused() -> None:
    shards = [Shard.of_heads(LAYOUT, i, 4) for i in range(4)]
    heads = QueryHeads.of(shards[0], shards, LAYOUT, 0)
    for num_heads in (2, 3, 5):
        with pytest.raises(InvalidRequestError, match="query"):
            heads.ranges(num_heads)
