"""Swaps, evicted blocks that are copied to the host tier, hits there, and windows."""

from __future__ import annotations

import pytest
from kvplane_blocks._native import ColumnError

from tests.helpers.native.native_pool import (
    DEVICE,
    HOST,
    Caller,
    Code,
    Kind,
    dump,
    i32,
    i64,
    new_pool,
    with_prompt,
)


def test_a_group_is_swapped_out_and_in_and_shared_blocks_are_copied_once() -> None:
    caller = with_prompt()
    with caller.step():
        caller.fork((1, 2))
        caller.append((2, 6, 1, [9], 0))
    first, second = caller.table(1), caller.table(2)
    caller.begin()
    assert caller.swap([1, 2], HOST) == 3
    plan = caller.finish()
    assert plan is not None and len(plan.transfers) == 3
    assert {source for source, _ in plan.transfers} == {*first, *second}
    assert [c.allocated for c in plan.changes] == [[True, True], [False, True]]
    assert [c.kind for c in plan.changes] == [Kind.REPLACE] * 2
    assert caller.table(1)[0] == caller.table(2)[0] != first[0]
    assert caller.pool.usage(DEVICE)[3] == 3, "sources are held until the plan has run"
    caller.receipted()
    assert caller.pool.usage(DEVICE)[3] == 0
    assert caller.append((1, 6, 1, [], 0))[1] == [(0, Code.SWAPPED, 1, HOST, 0)]
    with caller.step():
        assert caller.swap([2], DEVICE) == 2
    assert caller.state(2).tier == DEVICE and caller.state(1).tier == HOST
    with caller.step():
        assert caller.append((2, 7, 1, [3], 0)) == ([2], [])


def test_a_table_that_forks_share_is_copied_once() -> None:
    caller = with_prompt()
    caller.begin()
    caller.fork((1, 2))
    assert caller.swap([1, 2], HOST) == 2
    plan = caller.finish()
    assert plan is not None and len(plan.transfers) == 2
    assert caller.table(1) == caller.table(2)
    caller.pool.check_integrity()


def test_swapped_sequences_fork_truncate_and_publish_when_they_are_back() -> None:
    caller = with_prompt(list(range(9)))
    with caller.step():
        caller.swap([1], HOST)
        assert caller.fork((1, 2)) == ([3], [])
        assert caller.truncate((2, 5)) == ([0], [])
    assert len(caller.table(2)) == 2
    with caller.step():
        assert caller.swap([1, 2], DEVICE) == 3
    assert caller.pool.match(b"root", i32(range(8)))[0] == 2


def test_refused_swaps() -> None:
    caller = with_prompt(list(range(16)), num_host=4)
    with caller.step():
        caller.admit(2, [50] * 4)
    caller.begin()
    before = dump(caller.pool, [caller])
    assert caller.swap([9], HOST) == (0, Code.NOT_FOUND, 9, 0, 0)
    assert caller.swap([0], HOST) == (0, Code.NOT_FOUND, 0, 0, 0)
    assert caller.swap([2, 1], HOST) == (0, Code.NEVER, 5, 4, HOST)
    assert caller.swap([1], DEVICE) == (0, Code.SWAPPED, 1, DEVICE, 0)
    with pytest.raises(ColumnError) as raised:
        caller.swap([1, 2, 1], HOST)
    assert raised.value.args[:2] == ("sequence_ids", 2)
    with pytest.raises(ValueError, match="tier"):
        caller.swap([1], 3)
    assert dump(caller.pool, [caller]) == before
    assert caller.swap([1], HOST) == 4
    assert caller.swap([2], HOST) == (0, Code.LATER, 1, 0, HOST)


def test_a_swap_allocates_in_slices_between_which_nobody_takes_what_it_needs() -> None:
    caller = with_prompt(list(range(16)), num_host=6)
    pool, other = caller.pool, Caller(caller.pool, b"other")
    caller.begin()
    answer, held = pool.swap(caller.handle, i64([1]), HOST, 0, 1), list[int]()
    while answer is None:
        held.append(pool.usage(HOST)[3])
        assert pool.num_obtainable(other.handle, HOST) == 2
        assert pool.num_obtainable(caller.handle, HOST) == 6 - held[-1]
        pool.check_integrity()
        answer = pool.swap_some(caller.handle, 1)
    assert answer == 4
    assert held[:6] == [0, 1, 2, 3, 4, 4]


def test_a_swap_that_runs_short_between_its_slices_gives_back_what_it_allocated() -> None:
    caller = with_prompt(list(range(100, 116)), num_host=4)
    pool, other, third = caller.pool, Caller(caller.pool), Caller(caller.pool, b"third")
    for each, tokens in ((other, [0] * 4), (third, list(range(200, 216)))):
        with each.step():
            assert len(each.admit(1, tokens)) == 3, "the last evicts what is cached"
        with each.step():
            each.free(1)
    assert pool.match(b"root", i32([0] * 4))[:2] == (0, 1)
    table, usage = caller.table(1), pool.usage(HOST)
    assert usage == (4, 3, 1, 0, 0)
    caller.begin()
    assert pool.swap(caller.handle, i64([1]), HOST, 0, 3) is None
    assert pool.usage(HOST)[3] == 2
    with other.step():
        assert other.admit(2, [*[0] * 4, 9]) == (4, 2, 1), "copied from the host tier"
        num_slices, answer = 0, None
        while answer is None:
            answer, num_slices = pool.swap_some(caller.handle, 1), num_slices + 1
            pool.check_integrity()
        assert (answer, num_slices) == ((0, Code.LATER, 4, 3, HOST), 2)
        assert caller.table(1) == table
        assert pool.usage(HOST) == (4, 3, 0, 1, 0), "that of the prefix is read"
    assert caller.swap([1], HOST) == 4


def filled(num_device: int, num_host: int) -> Caller:
    """A pool of which all blocks are cached: those of [0] * 4, then of [1] * 4, and so on."""
    caller = Caller(new_pool(num_device, num_host))
    for i in range(num_device):
        caller.begin()
        caller.admit(1, [i] * 4)
        caller.finish()
        caller.receipted()
        with caller.step():
            caller.free(1)
    return caller


def test_what_is_evicted_is_copied_to_the_host_tier_and_found_after_its_receipt() -> None:
    caller = filled(4, 4)
    caller.begin()
    caller.admit(1, [9] * 4)
    plan = caller.finish()
    assert plan is not None
    ((source, copy),) = plan.transfers
    assert plan.allocations == [copy] and (source.tier, copy.tier) == (DEVICE, HOST)
    assert caller.table(1) == [source._replace(generation=source.generation + 1)]
    assert caller.pool.match(b"root", i32([0] * 4))[:2] == (0, 0)
    caller.receipted()
    caller.pool.check_integrity()
    assert caller.pool.match(b"root", i32([0] * 4))[:2] == (0, 1)
    assert caller.pool.usage(HOST) == (4, 3, 1, 0, 0)
    caller.begin()
    assert caller.admit(2, [*[0] * 4, 9]) == (4, 2, 1)
    plan = caller.finish()
    assert plan is not None and (copy, caller.table(2)[0]) in plan.transfers
    assert len(plan.transfers) == 3, "two more are evicted"
    assert caller.state(2).num_written == 0
    caller.receipted()
    caller.pool.check_integrity()
    assert caller.pool.match(b"root", i32([0] * 4))[:2] == (1, 0)


def test_what_the_host_tier_has_is_not_copied_again() -> None:
    caller = filled(4, 8)
    for tokens in ([9] * 4, [0] * 4):
        with caller.step():
            caller.admit(1, tokens)
        with caller.step():
            caller.free(1)
    assert caller.pool.match(b"root", i32([0] * 4))[:2] == (1, 0)
    num_copied = caller.pool.usage(HOST)[2]
    caller.begin()
    caller.admit(1, [8] * 16)
    plan = caller.finish()
    assert plan is not None and len(plan.transfers) == 3 and num_copied == 2
    caller.receipted()
    caller.pool.check_integrity()
    assert caller.pool.match(b"root", i32([0] * 4))[:2] == (0, 1)


def test_a_plan_copies_at_most_256_evicted_blocks_and_one_with_whole_tables_none() -> None:
    caller = filled(600, 600)
    caller.begin()
    caller.admit(1, [*[7] * 3, 8] * 300)
    plan = caller.finish()
    assert plan is not None and len(plan.transfers) == len(plan.allocations) == 256
    caller.receipted()
    caller.abort()
    caller.begin()
    caller.admit(2, [1000] * 4)
    plan = caller.finish()
    assert plan is not None and plan.resync and not plan.transfers and not plan.allocations
    caller.receipted()
    caller.pool.check_integrity()


def test_what_is_forgotten_while_it_is_copied_to_the_host_tier_does_not_stay_there() -> None:
    caller = filled(4, 4)
    with caller.in_flight():
        caller.admit(1, [9] * 4)
    pool = caller.pool
    assert pool.forget(caller.root, i32([0] * 4), True, 1) == (0, 0)
    assert not pool.forget_some(1000), "it waits for the receipt"
    pool.check_integrity()
    caller.receipted()
    pool.check_integrity()
    assert pool.usage(HOST)[1:3] == (4, 0)


def test_blocks_behind_the_window_go_back() -> None:
    caller = with_prompt(list(range(12)), window_tokens=6)
    caller.begin()
    assert caller.append((1, 12, 1, [], 0)) == ([4], [])
    plan = caller.finish()
    assert plan is not None
    assert [(c.kind, c.num) for c in plan.changes] == [(Kind.TRIM, 1), (Kind.SET, 1)]
    assert caller.table(1)[0] is None and caller.table(1)[1] is not None
    caller.receipted()
    caller.pool.check_integrity()
    assert caller.pool.usage(DEVICE) == (8, 4, 1, 3, 0)


def test_nothing_is_trimmed_that_an_abort_would_need() -> None:
    caller = with_prompt(list(range(4)), window_tokens=4)
    for first in range(4, 12):
        with caller.step():
            assert caller.append((1, first, 1, [], 0))[1] == []
    assert None not in caller.table(1), "only 4 tokens are known, so an abort leaves 4"
    caller.abort()
    assert caller.state(1).num_written == 4 and None not in caller.table(1)


def test_a_truncate_leaves_what_the_next_position_sees() -> None:
    caller = with_prompt(list(range(16)), window_tokens=6)
    with caller.step():
        caller.append((1, 16, 1, [16], 0))
    assert sum(ref is None for ref in caller.table(1)) == 2
    with caller.step():
        assert caller.truncate((1, 12))[1] == [(0, Code.TRIMMED, 1, 13, 12)]
        assert caller.truncate((1, 13))[1] == []


def test_a_trimmed_sequence_is_swapped_forked_and_sent_whole() -> None:
    caller = with_prompt(list(range(16)), window_tokens=6)
    with caller.step():
        caller.append((1, 16, 1, [16], 0))
    caller.begin()
    caller.fork((1, 2))
    assert caller.swap([1], HOST) == 3
    plan = caller.finish()
    assert plan is not None
    replaced = plan.changes[-1]
    assert (replaced.kind, replaced.first, replaced.num) == (Kind.REPLACE, 2, 3)
    caller.receipted()
    for keeps_tables, change in ((True, (Kind.KEEP, 0, 5)), (False, (Kind.REPLACE, 2, 3))):
        caller.abort(keeps_tables=keeps_tables)
        caller.begin()
        plan = caller.finish()
        assert plan is not None and plan.resync
        assert [(c.kind, c.first, c.num) for c in plan.changes] == [change] * 2
    caller.pool.check_integrity()


def test_blocks_behind_the_window_are_trimmed_before_what_follows_is_published() -> None:
    """Written while the sequence was on its way to the host tier, they were not published then."""
    pool = new_pool(64, 64, window_tokens=8)
    caller = Caller(pool)
    with caller.in_flight():
        assert len(caller.admit(1, list(range(80)))) == 3
    with caller.step():
        caller.swap([1], HOST)
    with caller.in_flight():
        caller.swap([1], DEVICE)
    with caller.in_flight():
        caller.append((1, 80, 4, [90, 91, 92, 93], 0))
    assert [*map(bool, caller.table(1))] == [False] * 18 + [True] * 3
    caller.receipted()
    pool.check_integrity()


def test_a_sequence_that_others_share_leaves_its_blocks_to_them() -> None:
    caller = with_prompt()
    with caller.step():
        caller.fork((1, 2))
        before = caller.table(2)
        assert caller.swap([1], HOST) == 2
    assert caller.table(2) == before
