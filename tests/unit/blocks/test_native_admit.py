"""Admissions: which prefix is found, what is allocated, and what is refused."""

from __future__ import annotations

import pytest

from tests.helpers.native.native_pool import DEVICE, HOST, Caller, Code, Kind, dump, new_pool

SIZE = 4
ABC = list(range(12))


def admitted(
    caller: Caller, sequence_id: int, tokens: list[int], **options: int
) -> tuple[int, ...]:
    """Admit in a step of its own, whose plan runs."""
    with caller.step():
        answer = caller.admit(sequence_id, tokens, **options)
    caller.pool.check_integrity()
    return answer


def blocks(caller: Caller, sequence_id: int) -> list[int]:
    return [ref.index for ref in caller.table(sequence_id) if ref]


def test_a_prompt_gets_blocks_and_is_computed() -> None:
    caller = Caller(new_pool(8))
    caller.begin()
    assert caller.admit(1, [*ABC, 12]) == (0, 4, 13)
    plan = caller.finish()
    assert plan is not None
    (change,) = plan.changes
    assert (change.kind, change.first, change.num) == (Kind.SET, 0, 4)
    assert change.allocated == [True] * 4
    assert caller.table(1) == change.blocks
    assert plan.spans == [(1, 0, 13)]
    assert caller.pool.usage(DEVICE) == (8, 4, 0, 4, 0)


def test_hits_that_are_in_use_cost_nothing() -> None:
    caller = Caller(new_pool(4))
    admitted(caller, 1, ABC)
    other = Caller(caller.pool)
    other.begin()
    assert other.admit(1, [*ABC[:8], 77]) == (8, 3, 1)
    plan = other.finish()
    assert plan is not None and plan.changes[0].allocated == [False, False]
    assert plan.changes[1].allocated == [True]
    assert blocks(other, 1)[:2] == blocks(caller, 1)[:2]


def test_hits_that_are_idle_are_taken_from_what_can_be_allocated() -> None:
    caller = Caller(new_pool(4))
    admitted(caller, 1, ABC)
    with caller.step():
        caller.free(1)
    assert caller.pool.usage(DEVICE) == (4, 1, 3, 0, 0)
    assert admitted(caller, 2, [*ABC[:8], 1, 2, 3, 4, 5]) == (8, 4, 5)
    assert caller.pool.usage(DEVICE)[1:] == (0, 0, 4, 0)


def test_a_prompt_that_is_cached_whole_computes_its_last_token_in_a_copy() -> None:
    caller = Caller(new_pool(8))
    admitted(caller, 1, ABC)
    caller.begin()
    assert caller.admit(2, ABC) == (11, 3, 1)
    plan = caller.finish()
    assert plan is not None
    ((source, copy),) = plan.transfers
    assert source == caller.table(1)[2] and copy == caller.table(2)[2] and source != copy
    assert plan.spans == [(2, 11, 1)]


def test_without_room_for_the_copy_the_last_block_is_computed_again() -> None:
    caller = Caller(new_pool(3))
    admitted(caller, 1, ABC)
    with caller.step():
        caller.free(1)
    assert admitted(caller, 2, ABC) == (8, 3, 4)


def test_a_prompt_that_a_sequence_of_the_session_computes_is_shared_before_it_is_written() -> None:
    caller = Caller(new_pool(8))
    with caller.in_flight():
        assert caller.admit(1, [*ABC, 50]) == (0, 4, 13)
        assert caller.admit(2, [*ABC, 60]) == (12, 4, 1)
    assert blocks(caller, 1)[:3] == blocks(caller, 2)[:3]
    assert caller.state(2).num_written == 0
    caller.receipted()
    assert caller.state(2).num_written == 13
    caller.pool.check_integrity()


def test_what_another_session_computes_is_found_only_when_it_is_written() -> None:
    caller = Caller(new_pool(16))
    with caller.in_flight():
        caller.admit(1, ABC)
    other = Caller(caller.pool)
    other.begin()
    assert other.admit(1, ABC) == (0, 3, 12)
    caller.receipted()
    assert other.admit(2, [*ABC, 1]) == (12, 4, 1)


def test_n_sequences_of_one_prompt_share_its_blocks_and_are_admitted_all_or_none() -> None:
    caller = Caller(new_pool(4))
    caller.begin()
    assert caller.admit(1, [*ABC, 12], forks=[2, 3]) == (0, 4, 13)
    plan = caller.finish()
    assert plan is not None and plan.spans == [(1, 0, 13)]
    assert [c.kind for c in plan.changes] == [Kind.SET, Kind.FORK, Kind.FORK]
    assert caller.table(1) == caller.table(2) == caller.table(3)
    assert caller.pool.usage(DEVICE)[3] == 4
    before = dump(caller.pool, [caller])
    caller.begin()
    assert caller.admit(4, [1], forks=[5, 4]) == (2, Code.EXISTS, 4, 0, 0)
    assert caller.admit(4, [1], forks=[0]) == (1, Code.BAD_ID, 0, 0, 0)
    assert caller.finish() is None
    assert dump(caller.pool, [caller]) == before


def test_a_fork_of_an_admission_does_not_copy_what_the_same_plan_computes() -> None:
    caller = Caller(new_pool(8))
    with caller.step():
        caller.admit(1, [1, 2, 3], forks=[2])
        assert caller.append((2, 3, 1, [4], 0))[1] == [(0, Code.BUSY, 2, 0, 0)]
        assert caller.swap([2], HOST) == (0, Code.BUSY, 2, 0, 0)
    caller.begin()
    assert caller.append((2, 3, 1, [4], 0), (1, 3, 1, [5], 0)) == ([1, 1], [])
    plan = caller.finish()
    assert plan is not None and len(plan.transfers) == 1


def test_what_the_same_plan_computes_is_not_copied_after_a_truncate() -> None:
    caller = Caller(new_pool(8, 8))
    with caller.step():
        caller.admit(1, ABC)
        caller.admit(2, [*ABC, 1], num_compute=0)
        assert caller.truncate((2, 6)) == ([0], [])
        assert caller.append((2, 6, 1, [9], 0))[1] == [(0, Code.BUSY, 2, 0, 0)]
        assert caller.swap([2], HOST) == (0, Code.BUSY, 2, 0, 0)
    caller.begin()
    assert caller.append((2, 6, 1, [9], 0))[1] == []


def test_chunks_take_blocks_as_they_come() -> None:
    caller = Caller(new_pool(8))
    with caller.step():
        assert caller.admit(1, ABC, num_compute=5) == (0, 2, 5)
    assert caller.pool.usage(DEVICE)[3] == 2
    with caller.step():
        assert caller.append((1, 5, 7, [], 0)) == ([3], [])
    assert caller.pool.match(b"root", b"".join(t.to_bytes(4, "little") for t in ABC))[0] == 3


def test_the_answers_without_room() -> None:
    caller = Caller(new_pool(4))
    before = dump(caller.pool, [caller])
    caller.begin()
    assert caller.admit(1, [0] * 17) == (0, Code.NEVER, 5, 4, DEVICE)
    assert caller.admit(1, [0], max_total=17) == (0, Code.NEVER, 5, 4, DEVICE)
    assert caller.admit(1, [0], max_total=2**63 - 1)[1] == Code.NEVER
    assert caller.admit(1, [0] * 16, headroom=1) == (0, Code.LATER_HEADROOM, 4, 3, DEVICE)
    assert dump(caller.pool, [caller]) == before
    assert caller.admit(1, [0] * 12) == (0, 3, 12)
    assert caller.admit(2, [1] * 8) == (0, Code.LATER, 2, 1, DEVICE)


def test_a_prompt_that_no_window_pool_can_hold_at_once_is_never_admitted_at_once() -> None:
    caller = Caller(new_pool(4, window_tokens=6))
    caller.begin()
    assert caller.admit(1, [0] * 20) == (0, Code.NEVER, 5, 4, DEVICE)
    assert caller.admit(1, [0] * 20, num_compute=8) == (0, 2, 8)


def test_an_admission_counts_table_entries() -> None:
    caller = Caller(new_pool(8, max_table_entries=7))
    caller.begin()
    assert caller.admit(1, ABC, forks=[2, 3]) == (0, Code.TOO_MANY_ENTRIES, 7, 0, 9)
    assert caller.admit(1, ABC, forks=[2]) == (0, 3, 12)


def test_tokens_count_as_the_table_entries_that_they_will_need() -> None:
    """Also of what computes nothing yet, and with no look-up."""
    for options in ({"num_compute": 0}, {"num_compute": 0, "skip": True}):
        caller = Caller(new_pool(8, max_table_entries=7))
        caller.begin()
        assert caller.admit(1, ABC, forks=[2], **options)[1:] == (0, 0)
        assert caller.admit(3, [5] * 5, **options) == (0, Code.TOO_MANY_ENTRIES, 7, 6, 2)
        assert caller.fork((1, 3)) == ([0], [(0, Code.TOO_MANY_ENTRIES, 7, 6, 3)])
        caller.truncate((2, 4))
        assert caller.admit(3, [5] * 5, **options)[1:] == (0, 0)
        caller.free(1)
        assert caller.admit(4, [5] * 5, **options)[1:] == (0, 0)
        caller.pool.check_integrity()


def test_too_many_sequences_are_refused() -> None:
    caller = Caller(new_pool(8, max_sequences=2))
    caller.begin()
    assert caller.admit(1, [1], forks=[2, 3]) == (0, Code.TOO_MANY_SEQUENCES, 2, 0, 0)
    assert caller.admit(1, [1], forks=[2]) == (0, 1, 1)
    assert caller.admit(3, [1]) == (0, Code.TOO_MANY_SEQUENCES, 2, 0, 0)


@pytest.mark.parametrize("sequence_id", [0, -1, -(2**63)])
def test_ids_below_1_are_refused(sequence_id: int) -> None:
    caller = Caller(new_pool(8))
    caller.begin()
    assert caller.admit(sequence_id, [1]) == (0, Code.BAD_ID, sequence_id, 0, 0)
    assert len(caller.admit(2**63 - 1, [1])) == 3


def test_a_block_that_equals_a_published_one_takes_over_its_prefix() -> None:
    caller = Caller(new_pool(5))
    admitted(caller, 1, ABC[:8])
    admitted(caller, 2, ABC[:8], skip=True)
    first, spare = blocks(caller, 1), blocks(caller, 2)
    assert caller.pool.take_publications(9)[0][1:2] == (_column(first),)
    with caller.step():
        caller.free(1)
    with caller.step():
        assert caller.admit(3, [7] * 12)[0] == 0  # evicts what 1 had
    caller.pool.check_integrity()
    told = [run[1] for run in caller.pool.take_publications(1)]
    assert _column(spare[:1]) in told and _column(spare[1:]) in told
    tokens = b"".join(t.to_bytes(4, "little") for t in ABC[:8])
    assert caller.pool.match(b"root", tokens)[0] == 2


@pytest.mark.timeout(60)  # an eviction that finds nothing would look for ever
def test_blocks_evicted_beside_one_whose_spare_takes_its_place_leave_nothing_behind() -> None:
    pool = new_pool(8, block_size=1, window_tokens=3)
    first, second, other = Caller(pool), Caller(pool), Caller(pool)
    admitted(first, 1, [1, 2, 3])
    admitted(second, 1, [1, 2, 3], skip=True)
    with second.step():
        assert second.append((1, 3, 1, [4], 0))[1] == []  # the window passes two of its blocks
    with first.step():
        first.free(1)
    with other.in_flight():
        assert (
            len(other.admit(1, [10, 11, 12, 13, 14])) == 3
        )  # evicts the last two of the first prompt
    pool.check_integrity()
    with second.step():
        second.free(1)
    other.receipted()
    with other.step():
        other.free(1)
    pool.check_integrity()
    assert pool.usage(DEVICE) == (8, 0, 8, 0, 0)
    with other.step():
        assert len(other.admit(2, list(range(20, 28)))) == 3
    pool.check_integrity()


def _column(indices: list[int]) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in indices)


def test_other_roots_share_nothing() -> None:
    caller = Caller(new_pool(16))
    admitted(caller, 1, ABC)
    other = Caller(caller.pool, b"bob")
    assert admitted(other, 1, ABC) == (0, 3, 12)
