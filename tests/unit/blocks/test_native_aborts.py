"""Aborts, whole tables, sessions that end, and what happens outside of steps."""

from __future__ import annotations

import pytest

from tests.helpers.native.native_pool import (
    DEVICE,
    HOST,
    PROMPT,
    Caller,
    Kind,
    i32,
    i64,
    new_pool,
    with_prompt,
)


def test_what_was_freed_before_an_aborted_plan_is_not_published() -> None:
    caller = Caller(new_pool(8))
    with caller.in_flight():
        caller.admit(1, list(range(8)))
    with caller.in_flight():
        caller.free(1)
    caller.abort()
    caller.begin()
    caller.ran()
    assert caller.pool.match(b"root", i32(range(8)))[0] == 0
    assert caller.pool.usage(DEVICE) == (8, 8, 0, 0, 0)


def test_whole_tables_say_what_is_allocated_and_send_children_as_forks() -> None:
    caller = with_prompt(list(range(300)), num_device=200)
    with caller.step():
        caller.fork((1, 2), (1, 3))
    caller.abort(keeps_tables=False)
    caller.begin()
    caller.append((3, 300, 1, [5], 0))
    plan = caller.finish()
    assert plan is not None and plan.resync
    assert plan.finished == 0, "it asks nothing of what the data plane has"
    one, two, three, rest = plan.changes
    assert (one.kind, one.num) == (Kind.REPLACE, 75)
    assert (two.kind, two.parent_id, two.num) == (Kind.FORK, 1, 75)
    assert (three.kind, three.parent_id) == (Kind.FORK, 1)
    assert three.num < 75 and (rest.kind, rest.first) == (Kind.SET, three.num)
    assert rest.allocated[-1] and not any(rest.allocated[:-1])
    assert rest.first + rest.num == 76


@pytest.mark.parametrize("is_cut", [False, True])
def test_what_goes_before_the_plan_after_an_abort_is_made_is_not_published(is_cut: bool) -> None:
    """That plan has none of the copies from the host tier that were to fill its blocks."""
    tokens = list(range(1, 9))
    caller = with_prompt(tokens, num_device=8, num_host=8)
    with caller.step():
        caller.free(1)
    with caller.step():
        assert len(caller.admit(2, [50] * 32)) == 3, "which moves the first prompt to the host tier"
    with caller.step():
        caller.free(2)
    assert caller.pool.match(b"root", i32(tokens))[:2] == (0, 2)
    caller.abort()
    if not is_cut:
        caller.begin()
    assert caller.admit(3, [*tokens, 7], num_compute=0, admitted_by=caller.number)[0] == 8
    if is_cut:
        caller.pool.cut(caller.handle, 3)
        caller.begin()
    else:
        assert caller.free(3)[1] == []
    plan = caller.finish()
    assert plan is not None and plan.changes == [] and plan.transfers == []
    caller.receipted()
    caller.pool.check_integrity()
    assert caller.pool.match(b"root", i32(tokens))[:2] == (0, 2)


def test_an_abort_gives_some_blocks_back_at_a_time_and_its_session_may_end_there() -> None:
    for num_pieces in range(4):
        caller = Caller(new_pool(16))
        with caller.in_flight():
            for i in (1, 2, 3):
                caller.admit(i, [i] * 12)
        left = [caller.pool.abort(caller.handle, 2, True, 1) for _ in range(num_pieces)]
        assert left == [True, True, False][:num_pieces]
        caller.pool.check_integrity()
        held = sum(state.num_blocks for state in caller.states())
        assert held == 3 * (3 - min(num_pieces, 3))
        caller.pool.end_session(caller.handle)
        while caller.pool.end_some(caller.handle, 1):
            caller.pool.check_integrity()
        caller.pool.session_fenced(caller.handle)
        caller.pool.check_integrity()
        assert caller.pool.usage(DEVICE)[1] == 16


def test_a_session_may_end_within_a_swap() -> None:
    answer, num_pieces = None, 0
    while answer is None:
        caller = with_prompt()
        with caller.step():
            caller.fork((1, 2))
            caller.append((2, 6, 1, [9], 0))
        caller.begin()
        assert caller.pool.swap(caller.handle, i64([1, 2]), HOST, 0, 0) is None
        for _ in range(num_pieces):
            answer = caller.pool.swap_some(caller.handle, 1)
            caller.pool.check_integrity()
        num_pieces += 1
        is_left = caller.pool.end_session(caller.handle, 1)
        while is_left:
            caller.pool.check_integrity()
            is_left = caller.pool.end_some(caller.handle, 1)
        caller.pool.session_fenced(caller.handle)
        caller.pool.check_integrity()
        assert [caller.pool.usage(tier)[3:] for tier in (DEVICE, HOST)] == [(0, 0), (0, 0)]
    assert answer == 3 and num_pieces > 8


def changes_after_an_abort(caller: Caller) -> list[tuple[int, int, int, int]]:
    """Kind, sequence, first entry and number of entries."""
    caller.abort()
    caller.begin()
    plan = caller.finish()
    assert plan is not None and plan.resync
    caller.pool.check_integrity()
    return [(c.kind, c.sequence_id, c.first, c.num) for c in plan.changes]


def test_what_the_data_plane_has_of_a_table_is_kept_after_an_abort() -> None:
    """Also after another one: until a plan with a change has run, what was changed is sent."""
    caller = with_prompt(list(range(16)), num_device=20)
    with caller.in_flight():
        caller.append((1, 16, 4, [1, 2, 3, 4], 0))
    for _ in range(2):
        assert changes_after_an_abort(caller) == [(Kind.KEEP, 1, 0, 4)]
    with caller.step():
        caller.append((1, 16, 4, [1, 2, 3, 4], 0))
    assert changes_after_an_abort(caller) == [(Kind.KEEP, 1, 0, 5)]


def test_a_check_between_steps_does_not_shift_a_grant() -> None:
    caller = with_prompt(list(range(4)), num_device=4, num_host=4)
    for token in (50, 51, 52, 53):
        with caller.step():
            caller.free(1)
            caller.admit(1, [token] * 4)
    assert caller.pool.match(b"root", i32(range(4)))[:2] == (0, 1)
    with caller.checks():
        caller.free(1)
    assert caller.admit(2, [*range(4), 5], admitted_by=1) == (4, 2, 0)
    caller.begin()
    caller.ran()
    assert caller.state(2).num_written == 4


def test_a_cut_frees_what_the_draft_allocates_only_after_its_plan() -> None:
    caller = Caller(new_pool(4))
    assert caller.admit(1, [1] * 16, admitted_by=0) == (0, 4, 0)
    caller.pool.cut(caller.handle, 1)
    caller.pool.check_integrity()
    other = Caller(caller.pool)
    other.begin()
    assert len(other.admit(1, [2])) == 5
    caller.begin()
    plan = caller.finish()
    assert plan is not None and [c.kind for c in plan.changes] == [Kind.SET, Kind.DROP]
    caller.receipted()
    assert len(other.admit(1, [2])) == 3


def test_a_cut_sequence_that_no_plan_touches_is_free_at_once() -> None:
    caller = with_prompt(PROMPT, num_device=2)
    assert caller.pool.cut(caller.handle, 1) == 2
    assert not caller.pool.has_sequence(caller.handle, 1)
    other = Caller(caller.pool)
    other.begin()
    assert len(other.admit(1, [2] * 8)) == 3
    assert other.pool.match(b"root", i32(PROMPT))[0] == 0
    with pytest.raises(KeyError):
        caller.pool.cut(caller.handle, 1)


def test_what_a_cut_sequence_wrote_is_published_when_its_receipt_comes() -> None:
    caller = Caller(new_pool(8))
    with caller.in_flight():
        caller.admit(1, list(range(8)))
    caller.pool.cut(caller.handle, 1)
    assert caller.pool.usage(DEVICE)[4] == 2
    caller.receipted()
    assert caller.pool.match(b"root", i32(range(8)))[0] == 2


def test_no_block_of_an_unfinished_plan_goes_to_another_session() -> None:
    caller = Caller(new_pool(2))
    with caller.in_flight():
        caller.admit(1, [1] * 8)
    with caller.in_flight():
        caller.free(1)
    other = Caller(caller.pool)
    other.begin()
    assert len(other.admit(1, [2])) == 5
    assert caller.pool.num_pending(other.handle, DEVICE) == 2
    caller.begin()
    assert len(caller.admit(2, [3] * 4)) == 3, "its own plans run in order"


def test_a_session_is_not_fenced_before_its_plans_have_ended() -> None:
    caller = with_prompt()
    with caller.in_flight():
        caller.swap([1], HOST)
        caller.free(1)
    is_left = caller.pool.end_session(caller.handle, 0)
    while is_left:
        with pytest.raises(IndexError):
            caller.pool.session_fenced(caller.handle)
        is_left = caller.pool.end_some(caller.handle, 1)
    caller.pool.session_fenced(caller.handle)
    caller.pool.check_integrity()
    assert [caller.pool.usage(tier)[3:] for tier in (DEVICE, HOST)] == [(0, 0), (0, 0)]


def test_what_is_free_at_once_is_not_kept_for_receipts() -> None:
    """A grant that comes when its step has begun counts for the next."""
    caller = Caller(new_pool(8, 6))
    for i, tokens in ((1, [0] * 9), (2, [5] * 32)):  # the first is evicted to the host tier
        with caller.step():
            caller.admit(i, tokens)
        with caller.step():
            caller.free(i)
    with caller.step():
        assert caller.admit(3, [0] * 13, num_compute=0, admitted_by=caller.number) == (8, 2, 0)
    caller.begin()
    caller.pool.cut(caller.handle, 3)
    caller.pool.check_integrity()


def test_only_an_ended_session_is_fenced_and_once() -> None:
    caller = Caller(new_pool(2))
    for handle in (caller.handle, 7, 2**32 - 1):
        with pytest.raises(IndexError):
            caller.pool.session_fenced(handle)
    caller.pool.end_session(caller.handle)
    with pytest.raises(IndexError):
        caller.pool.end_session(caller.handle)
    caller.pool.session_fenced(caller.handle)
    with pytest.raises(IndexError):
        caller.pool.session_fenced(caller.handle)


def test_an_abort_leaves_what_receipts_say_was_written() -> None:
    caller = with_prompt()
    with caller.in_flight():
        caller.append((1, 6, 6, [6, 7, 8], 8))
        caller.admit(2, [9] * 5)
    caller.abort()
    caller.pool.check_integrity()
    state = caller.state(1)
    assert (state.num_tokens, state.num_scheduled, state.num_written) == (6, 6, 6)
    assert (state.num_blocks, caller.state(2).num_blocks) == (2, 0)
    assert caller.pool.usage(DEVICE)[4] == 5, "aborted plans may still run"
    caller.begin()
    plan = caller.finish()
    assert plan is not None and plan.resync
    assert [(c.kind, c.sequence_id, c.num) for c in plan.changes] == [(Kind.KEEP, 1, 2)]
    assert plan.finished == 1
    caller.receipted()
    assert caller.pool.usage(DEVICE)[4] == 0


def test_frees_and_forks_of_an_aborted_step_stay() -> None:
    caller = with_prompt()
    with caller.in_flight():
        caller.fork((1, 2))
        caller.free(1)
    caller.abort()
    assert [state.sequence_id for state in caller.states()] == [2]
    assert caller.state(2).num_written == 6


def test_a_sequence_of_the_same_id_keeps_nothing() -> None:
    caller = with_prompt(list(range(16)), num_device=20)
    with caller.in_flight():
        caller.free(1)
    with caller.in_flight():
        assert len(caller.admit(1, list(range(16)))) == 3
    changes = changes_after_an_abort(caller)
    assert all(kind != Kind.KEEP for kind, *_ in changes)


def test_a_block_given_up_before_whole_tables_is_no_source_of_theirs() -> None:
    caller = with_prompt()
    caller.abort()
    assert len(caller.admit(2, [9, 9], admitted_by=2)) == 3
    caller.begin()
    assert caller.swap([2], HOST) == 1
    plan = caller.finish()
    assert plan is not None and plan.resync and plan.transfers == []
    assert caller.table(2)[0] in [ref for change in plan.changes for ref in change.blocks]


def test_a_granted_sequence_is_in_the_next_plan_and_computes_nothing() -> None:
    caller = with_prompt(list(range(8)))
    other = Caller(caller.pool)
    assert other.admit(5, [*range(8), 9, 9], admitted_by=1) == (8, 3, 0)
    assert other.state(5).admitted_by == 1
    other.begin()
    other.append((5, 8, 2, [], 0))
    plan = other.finish()
    assert plan is not None and plan.spans == [(5, 8, 2)]
    assert plan.changes[0].kind == Kind.SET
    other.receipted()
    assert other.state(5).num_written == 10


def test_sequences_of_later_sessions_are_apart_from_those_that_ended_in_flight() -> None:
    pool = new_pool(16)
    for _ in range(3):
        caller = Caller(pool)
        with caller.in_flight():
            caller.admit(1, PROMPT, forks=[2])
        pool.end_session(caller.handle)
        pool.session_fenced(caller.handle)
    caller = Caller(pool)
    caller.begin()
    for i in range(1, 5):
        caller.admit(i, [i] * 2)
    pool.check_integrity()
    assert [state.sequence_id for state in caller.states()] == [1, 2, 3, 4]
