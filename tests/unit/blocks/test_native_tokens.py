"""Sequences of one cached prefix share its tokens, and stay apart where they differ."""

from __future__ import annotations

import pytest

from tests.helpers.native.native_pool import Caller, OneGroup, i32, i64, new_pool

SIZE = 64
CHUNK = 256  # tokens
LONG = [i % 97 for i in range(3 * CHUNK + 5)]


def admitted(caller: Caller, sequence_id: int, tokens: list[int]) -> int:
    """Admit in a step of its own, whose plan runs; the tokens found cached."""
    with caller.step():
        answer = caller.admit(sequence_id, tokens)
        assert len(answer) == 3, answer
    return answer[0]


def assert_known(caller: Caller, known: dict[int, list[int]]) -> None:
    """The core has these tokens of the session's sequences: it would refuse others."""
    states = {state.sequence_id: state for state in caller.states()}
    assert {i: state.num_tokens for i, state in states.items()} == {
        i: len(tokens) for i, tokens in known.items()
    }
    given = {i: tokens for i, tokens in known.items() if tokens}
    refused = caller.pool.deferred_tokens(
        caller.handle,
        i64(given),
        i64(states[i].admitted_by for i in given),
        i32([0] * len(given)),
        i32(map(len, given.values())),
        i32(token for tokens in given.values() for token in tokens),
    )
    assert refused is None


def paged_pool(num_blocks: int = 128) -> OneGroup:
    return new_pool(num_blocks, block_size=SIZE)


def test_sequences_of_one_cached_prefix_share_its_whole_chunks() -> None:
    pool = paged_pool()
    callers = [Caller(pool) for _ in range(5)]
    assert admitted(callers[0], 1, LONG) == 0
    assert pool.num_token_chunks == 4
    for caller in callers[1:]:
        assert admitted(caller, 1, LONG) == 3 * CHUNK
    assert pool.num_token_chunks == 4 + 4, "each has the last of its own"
    for caller in callers:
        assert_known(caller, {1: LONG})
        pool.end_session(caller.handle)
        pool.check_integrity()
    assert pool.num_token_chunks == 0


def test_a_prefix_that_nobody_has_any_more_is_shared_by_those_who_come_next() -> None:
    pool = paged_pool()
    first, second, third = (Caller(pool) for _ in range(3))
    admitted(first, 1, LONG)
    with first.step():
        first.free(1)
    assert pool.num_token_chunks == 0
    admitted(second, 1, LONG)
    admitted(third, 1, LONG)
    assert pool.num_token_chunks == 4 + 1


@pytest.mark.parametrize("kept", [CHUNK, CHUNK + 1, 2 * CHUNK - 1, 3 * CHUNK])
def test_who_goes_on_otherwise_leaves_the_others_tokens(kept: int) -> None:
    pool = paged_pool()
    one, other, late = Caller(pool), Caller(pool), Caller(pool)
    admitted(one, 1, LONG)
    admitted(other, 2, LONG)
    for caller, sequence_id, token in ((one, 1, 1001), (other, 2, 1002)):
        with caller.step():
            caller.truncate((sequence_id, kept))
            caller.append((sequence_id, kept, 2, [token] * 2, 0))
    assert_known(one, {1: [*LONG[:kept], 1001, 1001]})
    assert_known(other, {2: [*LONG[:kept], 1002, 1002]})
    admitted(late, 3, LONG)
    assert_known(late, {3: LONG})
