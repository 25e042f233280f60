"""The block store: what happens to a block from its allocation to its eviction."""

from __future__ import annotations

import struct
from collections import Counter

import pytest

from control_plane.blocks.block_store import (
    CACHED,
    ENDED,
    FREE,
    HELD,
    PINNED,
    RETIRED,
    BlockStore,
)
from control_plane.blocks.integrity import check_store
from control_plane.blocks.prefix_index import NO_BLOCK

ONE, OTHER = 1, 2  # sessions


def new_store(num_blocks: int = 4) -> BlockStore:
    return BlockStore(num_blocks, block_size_tokens=1, generation=[0] * num_blocks)


def tokens(num_blocks: int) -> bytes:
    return struct.pack(f"<{num_blocks}i", *range(num_blocks))


def check(
    store: BlockStore,
    *tables: list[int],
    pins: tuple[int, ...] = (),
    finished: dict[int, int] | None = None,
) -> None:
    ref_count = Counter(block for table in tables for block in table)
    known = {ONE: 0, OTHER: 0} | (finished or {})
    check_store(store, "store", ref_count=ref_count, pins=Counter(pins), finished=known)


def test_a_block_that_is_allocated_again_has_a_new_generation() -> None:
    store = new_store(2)
    blocks = store.allocate(ONE, 2)
    assert sorted(blocks) == [0, 1]
    assert store.generations(blocks) == [1, 1]
    assert store.num_in[HELD] == 2
    store.release(blocks, ONE, 1)
    store.plans_finished(ONE, 1)
    assert store.num_in[FREE] == 2
    assert store.generations(store.allocate(OTHER, 2)) == [2, 2]


def test_a_released_block_is_retired_until_the_plan_has_finished() -> None:
    store = new_store()
    table = store.allocate(ONE, 3)
    assert store.release(table[::-1], ONE, 5) == 3
    assert [store.state[b] for b in table] == [RETIRED] * 3
    assert (store.num_obtainable(ONE), store.num_pending(ONE)) == (4, 0)
    assert (store.num_obtainable(OTHER), store.num_pending(OTHER)) == (1, 3)
    assert store.num_obtainable_of(table, ONE) == 3
    assert store.num_obtainable_of(table, OTHER) == 0
    check(store)
    store.plans_finished(ONE, 4)
    assert store.num_obtainable(OTHER) == 1
    store.plans_finished(ONE, 5)
    assert store.num_obtainable(OTHER) == 4
    check(store, finished={ONE: 5})


def test_a_block_waits_for_every_session_whose_plan_may_touch_it() -> None:
    store = new_store()
    table = store.allocate(ONE, 2)
    store.publish(b"root", NO_BLOCK, tokens(2), table)
    store.share(table)
    store.release(table[::-1], ONE, 7)
    store.release(table[::-1], OTHER, 3)
    assert store.num_obtainable(ONE) == store.num_obtainable(OTHER) == 2
    check(store)
    store.plans_finished(ONE, 9)
    assert store.num_obtainable(OTHER) == 4, "it waits for nobody else now"
    assert store.num_obtainable(ONE) == 2
    check(store, finished={ONE: 9})
    store.plans_finished(OTHER, 3)
    assert store.num_in[CACHED] == 2
    check(store, finished={ONE: 9, OTHER: 3})


def test_no_receipt_frees_what_an_ended_session_held() -> None:
    store = new_store()
    store.release(store.allocate(ONE, 4), ONE, ENDED)
    store.plans_finished(ONE, ENDED - 1)
    assert store.num_obtainable(OTHER) == 0
    store.session_fenced(ONE)
    assert store.num_obtainable(OTHER) == 4
    check(store)


def test_a_pinned_block_is_neither_free_nor_retired() -> None:
    store = new_store()
    (block,) = store.allocate(ONE, 1)
    store.pin(block)
    store.release([block], ONE, 1)
    store.plans_finished(ONE, 1)
    assert store.state[block] == PINNED
    assert store.num_pending(OTHER) == 1
    check(store, pins=(block,), finished={ONE: 1})
    store.unpin([block])
    assert store.state[block] == FREE
    check(store, finished={ONE: 1})


def test_tails_are_evicted_before_heads_also_of_a_head_that_was_cached_first() -> None:
    store = new_store(3)
    table = store.allocate(ONE, 3)
    store.publish(b"root", NO_BLOCK, tokens(3), table)
    for blocks in (table[:1], table[:0:-1]):  # the head alone first, then the tails
        store.release(blocks, ONE, 1)
        store.plans_finished(ONE, 1)
    check(store, finished={ONE: 1})
    assert store.allocate(OTHER, 2) == table[:0:-1]
    assert store.num_evictions == 2
    assert store.index.match(b"root", tokens(3)) == table[:1]


def test_a_hit_is_held_again_whether_cached_or_retired() -> None:
    store = new_store()
    table = store.allocate(ONE, 2)
    store.publish(b"root", NO_BLOCK, tokens(2), table)
    store.release(table[:0:-1], ONE, 1)
    store.plans_finished(ONE, 1)
    store.release(table[:1], ONE, 2)
    assert [store.state[b] for b in table] == [RETIRED, CACHED]
    store.share(table)
    assert store.num_in[HELD] == 2
    assert store.generations(table) == [1, 1]
    check(store, table, finished={ONE: 1})


def test_only_a_block_of_one_table_that_is_not_published_may_be_written() -> None:
    store = new_store()
    table = store.allocate(ONE, 3)
    shared, published, own = table
    store.share([shared])
    store.publish(b"root", NO_BLOCK, tokens(1), [published])
    assert [store.is_writable(b) for b in table] == [False, False, True]
    store.pin(own)
    assert not store.is_writable(own)
    check(store, table, [shared], pins=(own,))


@pytest.mark.parametrize("publishes", [False, True])
def test_a_session_reuses_last_the_retired_blocks_that_hold_a_prefix_or_will(
    publishes: bool,
) -> None:
    store = new_store(4)
    plain, kept = store.allocate(ONE, 2), store.allocate(ONE, 2)
    store.release(kept[::-1], ONE, 2)
    store.release(plain[::-1], ONE, 2)
    if publishes:
        assert store.publish(b"root", NO_BLOCK, tokens(2), kept) == (kept, [], kept[1])
    else:
        store.keep(kept[::-1])
    check(store)
    assert set(store.allocate(ONE, 2)) == set(plain)
    assert store.allocate(ONE, 1) == kept[1:], "the tail first"
    assert store.num_evictions == publishes
    assert store.index.match(b"root", tokens(2)) == (kept[:1] if publishes else [])


def test_restored_blocks_are_cached_and_the_first_is_evicted_first() -> None:
    store = BlockStore(3, block_size_tokens=1, generation=[4, 5, 6])
    store.index.publish(b"root", NO_BLOCK, tokens(2), [2, 0])
    store.restore([0, 2])
    check(store)
    assert store.allocate(ONE, 2) == [1, 0]
    assert store.generations([0, 1, 2]) == [5, 6, 6]
    check(store, [0, 1])


def test_a_release_by_many_sessions_shares_what_it_waits_for() -> None:
    store = new_store(100)
    table = store.allocate(ONE, 100)
    store.publish(b"root", NO_BLOCK, tokens(100), table)
    for session_id in range(2, 50):
        store.share(table)
        store.release(table[::-1], session_id, 1)
    waits = {id(after) for after in store.retire_after}
    assert len(waits) == 1, "one dict for all blocks of a table, not one a block"
