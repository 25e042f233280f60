"""Append, truncate, fork and free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from random import Random

import pytest

from tests.helpers.native.native_pool import (
    DEVICE,
    HOST,
    Caller,
    Code,
    Kind,
    dump,
    i32,
    new_pool,
    with_prompt,
)


def test_an_append_in_place_changes_no_table() -> None:
    caller = with_prompt()
    caller.begin()
    assert caller.append((1, 6, 2, [7, 8], 0)) == ([2], [])
    plan = caller.finish()
    assert plan is not None
    assert (plan.changes, plan.transfers, plan.spans) == ([], [], [(1, 6, 2)])


def test_an_append_over_block_edges_allocates_what_it_crosses_into() -> None:
    caller = with_prompt()
    caller.begin()
    assert caller.append((1, 6, 7, [], 0)) == ([4], [])
    plan = caller.finish()
    assert plan is not None
    (change,) = plan.changes
    assert (change.kind, change.first, change.num) == (Kind.SET, 2, 2)


def test_lookahead_slots_are_allocated_and_not_computed() -> None:
    caller = with_prompt()
    caller.begin()
    assert caller.append((1, 6, 1, [7], 4)) == ([3], [])
    plan = caller.finish()
    assert plan is not None and plan.spans == [(1, 6, 1)]
    caller.receipted()
    caller.begin()
    assert caller.append((1, 7, 3, [], 0)) == ([3], [])
    plan = caller.finish()
    assert plan is not None and plan.changes == []


def test_of_two_sharers_the_first_copies_and_the_last_writes_in_place() -> None:
    caller = with_prompt()
    with caller.step():
        caller.fork((1, 2))
    (shared,) = {caller.table(1)[1], caller.table(2)[1]}
    caller.begin()
    assert caller.append((2, 6, 1, [7], 0), (1, 6, 1, [8], 0)) == ([2, 2], [])
    plan = caller.finish()
    assert plan is not None
    assert plan.transfers == [(shared, caller.table(2)[1])]
    assert caller.table(1)[1] == shared != caller.table(2)[1]


def test_what_a_copy_reads_is_not_written_before_its_plan_has_run() -> None:
    caller = with_prompt()
    with caller.step():
        caller.fork((1, 2))
    shared = caller.table(1)[1]
    caller.begin()
    caller.append((2, 6, 1, [7], 0))
    caller.truncate((1, 5))
    caller.append((1, 5, 1, [8], 0))
    assert shared not in (caller.table(1)[1], caller.table(2)[1]), "the plan may run again"
    plan = caller.finish()
    assert plan is not None and len(plan.transfers) == 2


def test_refused_appends() -> None:
    caller = with_prompt(num_device=4)
    caller.begin()
    before = dump(caller.pool, [caller])
    for row, failure in [
        ((9, 6, 1, [], 0), (0, Code.NOT_FOUND, 9, 0, 0)),
        ((0, 6, 1, [], 0), (0, Code.NOT_FOUND, 0, 0, 0)),
        ((-(2**63), 6, 1, [], 0), (0, Code.NOT_FOUND, -(2**63), 0, 0)),
        ((1, 5, 1, [], 0), (0, Code.POSITION, 1, 6, 5)),
        ((1, -1, 1, [], 0), (0, Code.POSITION, 1, 6, -1)),
        ((1, 2**31 - 1, 2**31 - 1, [], 2**31 - 1), (0, Code.POSITION, 1, 6, 2**31 - 1)),
        ((1, -(2**31), 1, [], 0), (0, Code.POSITION, 1, 6, -(2**31))),
        ((1, 6, -1, [], 0), (0, Code.NEGATIVE, 0, 0, 0)),
        ((1, 6, -(2**31), [], 0), (0, Code.NEGATIVE, 0, 0, 0)),
        ((1, 6, 1, [], -1), (0, Code.NEGATIVE, 2, 0, 0)),
        ((1, 6, 1, [-5], 0), (0, Code.NEGATIVE, 1, 0, 0)),
        ((1, 6, 2**31 - 1, [], 2**31 - 1), (0, Code.NEVER, 2**30 + 1, 4, DEVICE)),
        ((1, 6, 0, [0] * 11, 0), (0, Code.NEVER, 5, 4, DEVICE)),
    ]:
        assert caller.append(row) == ([0], [failure]), row
        assert dump(caller.pool, [caller]) == before
    assert caller.admit(2, [9]) == (0, 1, 1)
    assert caller.append((1, 6, 7, [], 0)) == ([0], [(0, Code.LATER, 2, 1, DEVICE)])


def test_an_append_is_sure_of_its_room_by_its_columns_alone() -> None:
    caller = with_prompt(num_device=4)  # of 4 tokens each, of which the prompt has 2
    with caller.in_flight():
        before = dump(caller.pool, [caller])
        for rows in (
            [(1, 6, 4, [], 0)],  # takes 1: at most 2 for a sequence, and 1 for 4 slots
            [(1, 6, 1, [], 3)],
            [(1, 6, 1, [], 0), (9, 0, 0, [], 0)],
        ):
            assert caller.append_if_sure(*rows) is None
            assert dump(caller.pool, [caller]) == before
        assert caller.append_if_sure((1, 6, 3, [], 0)) == ([3], [])
        assert caller.append_if_sure((9, 0, 1, [], 0)) is None, "one block is left"
    caller.begin()
    assert caller.free(1) == ([3], [])
    refused = caller.append_if_sure((9, 0, 1, [], 0))
    assert refused == ([0], [(0, Code.NOT_FOUND, 9, 0, 0)]), "what is refused, is refused alike"


def test_a_neighbour_of_a_refused_item_is_done() -> None:
    caller = with_prompt()
    caller.begin()
    answer = caller.append((1, 6, 1, [], 0), (9, 0, 1, [], 0), (1, 7, 1, [], 0))
    assert answer == ([2, 0, 0], [(1, Code.NOT_FOUND, 9, 0, 0), (2, Code.BUSY, 1, 0, 0)])


def test_a_truncate_gives_back_what_was_written_and_what_was_not() -> None:
    caller = with_prompt()
    with caller.in_flight():
        caller.append((1, 6, 10, [6, 7, 8], 0))
    caller.begin()
    assert caller.truncate((1, 7)) == ([2], [])
    plan = caller.finish()
    assert plan is not None
    assert [(c.kind, c.num) for c in plan.changes] == [(Kind.TRUNCATE, 2)]
    state = caller.state(1)
    assert (state.num_tokens, state.num_scheduled, state.num_written) == (7, 7, 6)
    caller.receipted()
    caller.pool.check_integrity()
    assert caller.state(1).num_written == 7
    assert caller.pool.usage(DEVICE)[3] == 2


def test_refused_truncates() -> None:
    caller = with_prompt()
    caller.begin()
    before = dump(caller.pool, [caller])
    for row, failure in [
        ((9, 1), (0, Code.NOT_FOUND, 9, 0, 0)),
        ((0, 1), (0, Code.NOT_FOUND, 0, 0, 0)),
        ((1, 7), (0, Code.TOO_LONG, 1, 6, 7)),
        ((1, 2**31 - 1), (0, Code.TOO_LONG, 1, 6, 2**31 - 1)),
        ((1, 0), (0, Code.NEGATIVE, 3, 0, 0)),
        ((1, -1), (0, Code.NEGATIVE, 3, 0, 0)),
        ((1, -(2**31)), (0, Code.NEGATIVE, 3, 0, 0)),
    ]:
        assert caller.truncate(row) == ([0], [failure])
        assert dump(caller.pool, [caller]) == before
    assert caller.truncate((1, 1)) == ([1], [])
    caller.pool.check_integrity()


def test_forks_copy_neither_tokens_nor_tables() -> None:
    caller = with_prompt(num_device=200, tokens=list(range(600)))
    num_held = caller.pool.num_blocks_held(caller.handle)
    caller.begin()
    assert caller.fork((1, 2), (2, 3), (9, 4), (1, 3), (1, 0))[1] == [
        (2, Code.NOT_FOUND, 9, 0, 0),
        (3, Code.EXISTS, 3, 0, 0),
        (4, Code.BAD_ID, 0, 0, 0),
    ]
    plan = caller.finish()
    assert plan is not None
    assert [(c.kind, c.sequence_id, c.parent_id) for c in plan.changes] == [
        (Kind.FORK, 2, 1),
        (Kind.FORK, 3, 2),
    ]
    assert caller.pool.num_blocks_held(caller.handle) == num_held


@pytest.mark.parametrize(
    "order", [sorted, partial(sorted, reverse=True), partial(Random(1).sample, k=1000)]
)
def test_a_chain_of_a_thousand_forks_is_made_sent_whole_and_ended_in_any_order(
    order: Callable[[Sequence[int]], list[int]],
) -> None:
    """Each is of other tokens than the one that it is a fork of."""
    caller, ids = Caller(new_pool(1010)), range(1, 1001)
    with caller.step():
        caller.admit(1, range(9))
    with caller.step():
        assert caller.fork(*pairwise(ids))[1] == []
    assert caller.pool.usage(DEVICE)[3] == 3
    with caller.step():
        assert caller.append(*((i, 9, 1, [i], 0) for i in ids[1:]))[1] == []
    with caller.step():
        assert caller.truncate(*((i, 9) for i in ids[1:]))[1] == []
    assert caller.pool.usage(DEVICE)[3] == 2 + 1000
    caller.abort(keeps_tables=False)
    with caller.step():
        assert caller.free(*order(ids))[1] == []
    assert caller.pool.usage(DEVICE)[3:] == (0, 0)
    assert caller.states() == []


def test_a_sequence_that_this_step_computes_is_busy() -> None:
    caller = with_prompt()
    caller.begin()
    caller.append((1, 6, 1, [], 0))
    busy = (0, Code.BUSY, 1, 0, 0)
    assert caller.fork((1, 2))[1] == [busy]
    assert caller.free(1)[1] == [busy]
    assert caller.truncate((1, 1))[1] == [busy]
    assert caller.swap([1], HOST) == busy


def test_a_sequence_freed_before_its_receipt_is_published_all_the_same() -> None:
    caller = Caller(new_pool(8))
    with caller.in_flight():
        caller.admit(1, list(range(8)))
    with caller.in_flight():
        assert caller.free(1) == ([2], [])
        assert caller.free(1, 0)[1] == [(0, Code.NOT_FOUND, 1, 0, 0), (1, Code.NOT_FOUND, 0, 0, 0)]
    assert caller.pool.match(b"root", i32(range(8)))[0] == 0
    caller.receipted()
    assert caller.pool.match(b"root", i32(range(8)))[0] == 2
    assert caller.pool.usage(DEVICE) == (8, 6, 2, 0, 0)


def test_a_block_that_receipts_may_still_publish_is_not_written_by_who_shares_it() -> None:
    caller = Caller(new_pool(8))
    with caller.in_flight():
        caller.admit(1, list(range(8)))
    with caller.in_flight():
        caller.fork((1, 2))
        caller.free(1)
        caller.truncate((2, 6))
        assert caller.append((2, 6, 2, [90, 91], 0)) == ([2], [])
    caller.pool.receipted(caller.handle, 1)
    (run,) = caller.pool.take_publications(9)
    assert caller.table(2)[1].index.to_bytes(4, "little") not in [run[1][:4], run[1][4:]]
    assert caller.pool.match(b"root", i32(range(8)))[0] == 2
    caller.pool.check_integrity()


def test_tokens_that_are_deferred_publish_what_is_written() -> None:
    caller = with_prompt()
    with caller.step():
        caller.append((1, 6, 6, [], 0))
    assert caller.pool.match(b"root", i32(range(12)))[0] == 1
    before = dump(caller.pool, [caller])
    for rows, failure in [
        (((1, 1, 6, [6, 7]), (9, 1, 0, [1])), (1, Code.NOT_FOUND, 9, 0, 0)),
        (((0, 1, 6, [6, 7]),), (0, Code.NOT_FOUND, 0, 0, 0)),
        (((1, 2, 6, [6]),), (0, Code.OTHER_ADMISSION, 1, 1, 2)),
        (((1, 1, 7, [7]),), (0, Code.NOT_KNOWN, 1, 6, 7)),
        (((1, 1, -1, [7]),), (0, Code.NOT_KNOWN, 1, 6, -1)),
        (((1, 1, 2**31 - 1, [7]),), (0, Code.NOT_KNOWN, 1, 6, 2**31 - 1)),
        (((1, 1, 6, [6] * 7),), (0, Code.BEYOND_SLOTS, 1, 12, 0)),
        (((1, 1, 5, [6, 6]),), (0, Code.OTHER_TOKENS, 1, 5, 0)),
        (((1, 1, 6, [6, 7]), (1, 1, 6, [6, 8, 8])), (1, Code.OTHER_TOKENS, 1, 6, 0)),
        (((1, 1, 6, [6]), (1, 1, 7, [7]), (1, 1, 6, [9, 7])), (2, Code.OTHER_TOKENS, 1, 6, 0)),
        (((1, 1, 6, [6]), (1, 1, 6, [6, 7]), (1, 1, 7, [9])), (2, Code.OTHER_TOKENS, 1, 7, 0)),
    ]:
        assert caller.deferred(*rows) == failure
        assert dump(caller.pool, [caller]) == before
    assert caller.deferred((1, 1, 5, [5, 6, 7, 8]), (1, 1, 7, [7, 8, 9, 10, 11])) is None
    assert caller.pool.match(b"root", i32(range(12)))[0] == 3


def test_unpublished_blocks_are_reused_before_published_ones_and_tails_before_heads() -> None:
    caller = with_prompt(num_device=5, tokens=list(range(14)))
    one = [ref.index for ref in caller.table(1) if ref]
    with caller.step():
        caller.free(1)
    with caller.step():
        caller.admit(2, [9] * 16)
    taken = [ref.index for ref in caller.table(2) if ref]
    assert one[0] not in taken and set(one[1:]) < set(taken)
    assert taken.index(one[3]) < taken.index(one[2]) < taken.index(one[1])


def test_a_sequence_goes_on_when_it_is_scheduled_receipted_moved_or_given_blocks() -> None:
    caller = with_prompt()
    pool = caller.pool

    def at(now_s: float) -> None:
        pool.set_time(now_s)
        caller.begin()

    at(1.0)
    caller.append((1, 6, 1, [7], 0))
    assert pool.family_progress(caller.handle, 1) == (1.0, True)
    caller.finish()
    pool.set_time(2.0)
    caller.receipted()
    assert pool.family_progress(caller.handle, 1) == (2.0, False)
    at(3.0)
    caller.ran()
    assert pool.family_progress(caller.handle, 1) == (2.0, False), "a step without it"
    assert pool.reserve(caller.handle, 1, 1)
    assert pool.family_progress(caller.handle, 1) == (3.0, False)
    at(4.0)
    caller.swap([1], HOST)
    caller.ran()
    assert pool.family_progress(caller.handle, 1) == (0.0, False), "none is on the device"
    at(5.0)
    caller.swap([1], DEVICE)
    caller.ran()
    assert pool.family_progress(caller.handle, 1) == (5.0, False)


def test_a_family_holds_what_its_members_on_the_device_hold() -> None:
    caller = with_prompt()
    with caller.step():
        caller.fork((1, 2), (2, 3))
    pool, handle = caller.pool, caller.handle
    assert pool.family_held(handle, 1) == 6, "two blocks of each of three tables"
    assert pool.num_device_blocks_held(handle) == 2
    with caller.step():
        assert caller.swap([1], HOST) == 2
    assert (pool.family_held(handle, 1), pool.num_device_blocks_held(handle)) == (4, 4)


def test_a_truncated_block_that_is_published_is_left_to_its_readers() -> None:
    caller = with_prompt(tokens=list(range(8)))
    published = caller.table(1)[1]
    caller.begin()
    assert caller.truncate((1, 6)) == ([0], [])
    assert caller.append((1, 6, 2, [90, 91], 0)) == ([2], [])
    plan = caller.finish()
    assert plan is not None and plan.transfers == [(published, caller.table(1)[1])]
    caller.receipted()
    assert caller.pool.match(b"root", i32(range(8)))[0] == 2
    assert caller.pool.match(b"root", i32([0, 1, 2, 3, 4, 5, 90, 91]))[0] == 2
    caller.pool.check_integrity()


def test_children_differ_from_where_they_grow() -> None:
    caller = with_prompt(num_device=400, tokens=list(range(599)))
    with caller.step():
        caller.fork((1, 2), (2, 3))
    with caller.step():
        caller.append((3, 599, 9, [], 0))
    assert caller.table(3)[:149] == caller.table(1)[:149]
    assert caller.table(3)[149] != caller.table(1)[149] == caller.table(2)[149]
    with caller.step():
        caller.free(1, 2)
    assert len(caller.table(3)) == 152
    caller.pool.check_integrity()
