"""Columns that cannot be read, values at the extremes, and checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvplane_blocks._native import ColumnError, LayerGroup, Pool

from tests.helpers.native.native_pool import DEVICE, HOST, Caller, Code, dump, i32, i64, new_pool

ODD = b"\0" * 7
ONE = i64([1])
FEW = i32([1])


@pytest.fixture
def caller() -> Caller:
    """A session in a step, with sequence 1 of six tokens."""
    caller = Caller(new_pool(8, 4))
    with caller.step():
        caller.admit(1, list(range(6)))
    caller.begin()
    return caller


Call = Callable[[Pool, int], Any]
BAD: list[tuple[str, int, Call]] = [
    ("token_ids", -1, lambda p, s: p.admit(s, 2, ODD, b"", -1, 0, False, 0)),
    ("token_ids", -1, lambda p, s: p.admit(s, 2, b"", b"", -1, 0, False, 0)),
    ("fork_sequence_ids", -1, lambda p, s: p.admit(s, 2, FEW, ODD, -1, 0, False, 0)),
    ("sequence_ids", -1, lambda p, s: p.append(s, ODD, FEW, FEW, FEW, FEW, b"")),
    ("first_positions", -1, lambda p, s: p.append(s, ONE, b"", FEW, FEW, FEW, b"")),
    ("num_slots", -1, lambda p, s: p.append(s, ONE, FEW, b"", FEW, FEW, b"")),
    ("num_tokens", -1, lambda p, s: p.append(s, ONE, FEW, FEW, FEW * 2, FEW, b"")),
    ("num_tokens", 0, lambda p, s: p.append(s, ONE, FEW, FEW, i32([-1]), b"", b"")),
    ("token_ids", -1, lambda p, s: p.append(s, ONE, FEW, FEW, i32([2**31 - 1]), FEW, b"")),
    ("token_ids", -1, lambda p, s: p.append(s, ONE, FEW, FEW, FEW, FEW * 2, b"")),
    ("num_lookahead_slots", -1, lambda p, s: p.append(s, ONE, FEW, FEW, FEW, FEW, FEW * 2)),
    ("num_tokens", -1, lambda p, s: p.truncate(s, ONE, b"")),
    ("sequence_ids", -1, lambda p, s: p.truncate(s, ODD, FEW)),
    ("parent_sequence_ids", -1, lambda p, s: p.fork(s, b"", ONE)),
    ("sequence_ids", -1, lambda p, s: p.fork(s, ONE, ODD)),
    ("sequence_ids", -1, lambda p, s: p.free(s, ODD)),
    ("sequence_ids", -1, lambda p, s: p.swap(s, ODD, HOST)),
    ("admitted_by", -1, lambda p, s: p.deferred_tokens(s, ONE, b"", FEW, FEW, FEW)),
    ("num_tokens", 0, lambda p, s: p.deferred_tokens(s, ONE, ONE, FEW, i32([0]), b"")),
    ("token_ids", 0, lambda p, s: p.deferred_tokens(s, ONE, ONE, FEW, FEW, i32([-1]))),
    ("token_ids", -1, lambda p, s: p.find(b"root", ODD)),
]


@pytest.mark.parametrize(("column", "index", "call"), BAD)
def test_a_column_that_cannot_be_read_is_named(
    caller: Caller, column: str, index: int, call: Call
) -> None:
    before = dump(caller.pool, [caller])
    with pytest.raises(ColumnError) as raised:
        call(caller.pool, caller.handle)
    assert raised.value.args[:2] == (column, index)
    assert dump(caller.pool, [caller]) == before


@pytest.mark.parametrize("handle", [1, 2**31, 2**32 - 1])
def test_a_handle_without_a_session_is_refused(caller: Caller, handle: int) -> None:
    pool = caller.pool
    calls: list[Callable[[], Any]] = [
        lambda: pool.begin(handle, 1),
        lambda: pool.admit(handle, 1, FEW, b"", -1, 0, False, 0),
        lambda: pool.append(handle, ONE, FEW, FEW, FEW, FEW, b""),
        lambda: pool.free(handle, ONE),
        lambda: pool.swap(handle, ONE, HOST),
        lambda: pool.finish(handle, b""),
        lambda: pool.abort(handle, 1),
        lambda: pool.receipted(handle, 1),
        lambda: pool.states(handle, None),
        lambda: pool.table(handle, 1),
        lambda: pool.cut(handle, 1),
        lambda: pool.end_session(handle),
    ]
    for call in calls:
        with pytest.raises(IndexError):
            call()


def test_what_is_asked_of_an_unknown_sequence_is_a_key_error(caller: Caller) -> None:
    for i in (0, 9, -(2**63)):
        for call in (caller.pool.table, caller.pool.cut, caller.pool.family_of):
            with pytest.raises(KeyError):
                call(caller.handle, i)
        with pytest.raises(KeyError):
            caller.pool.states(caller.handle, i64([1, i]))
        assert not caller.pool.has_sequence(caller.handle, i)


@pytest.mark.parametrize(
    ("sizes", "settings", "named"),
    [
        ((3, 4, 4), {}, "block_size_tokens"),
        ((0, 4, 4), {}, "block_size_tokens"),
        ((512, 4, 4), {}, "block_size_tokens"),
        ((4, 2**31, 4), {}, "blocks"),
        ((4, 4, 2**32 - 1), {}, "blocks"),
        ((4, 4, 4), {"eviction_policy": "no such policy"}, "no such policy"),
        ((4, 4, 4), {"window_tokens": -1}, "window_tokens"),
        ((4, 4, 4), {"max_owner_blocks": -1}, "max_owner_blocks"),
        ((4, 4, 4), {"device_generations": ODD}, "generations"),
        ((4, 4, 4), {"window": 1}, "no such setting"),
    ],
)
def test_a_pool_that_cannot_be(
    sizes: tuple[int, int, int], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        LayerGroup(*sizes, **settings)


@pytest.mark.parametrize("now_s", [-1.0, 1e300, float("nan"), float("inf")])
def test_a_time_that_is_none(now_s: float) -> None:
    with pytest.raises(ValueError, match="now_s"):
        new_pool(4).set_time(now_s)


def test_headroom_is_not_negative(caller: Caller) -> None:
    with pytest.raises(ValueError, match="headroom"):
        caller.admit(2, [1], headroom=-(2**63))


def test_a_pool_of_no_blocks_never_has_room() -> None:
    caller = Caller(new_pool(0))
    caller.begin()
    assert caller.admit(1, [1]) == (0, Code.NEVER, 1, 0, DEVICE)
    assert caller.finish() is None
    caller.pool.check_integrity()


def test_numbers_to_compute_at_the_extremes(caller: Caller) -> None:
    assert caller.admit(2, [9] * 5, num_compute=2**63 - 1) == (0, 2, 5)
    assert caller.admit(3, [8] * 5, num_compute=-(2**63)) == (0, 2, 5)
    assert caller.admit(4, [8] * 5, max_total=-(2**63), num_compute=0) == (4, 1, 0)


@pytest.mark.parametrize("first", [2**31 - 1, -(2**31)])
@pytest.mark.parametrize("num_slots", [2**31 - 1, -(2**31)])
def test_the_growth_of_what_has_no_end_is_none(caller: Caller, first: int, num_slots: int) -> None:
    """Nor is it counted: sanitizers see that."""
    columns = i64([1, 9]), i32([first] * 2), i32([num_slots] * 2), i32([num_slots] * 2)
    assert caller.pool.growth(caller.handle, *columns) == bytes(8)


def test_ten_million_tokens_are_refused_at_once(caller: Caller) -> None:
    assert caller.admit(2, [1] * 10_000_000)[1] == Code.NEVER


def test_many_forks_are_checked_in_time() -> None:
    caller = Caller(new_pool(8))
    caller.begin()
    ids = list(range(2, 65536))
    assert caller.admit(1, [1], forks=[*ids, 2]) == (65535, Code.EXISTS, 2, 0, 0)
    assert caller.admit(1, [1], forks=ids) == (0, 1, 1)
    caller.pool.check_integrity()


def test_items_are_checked_by_themselves() -> None:
    caller = Caller(new_pool(4, max_sequences=3))
    with caller.step():
        caller.admit(1, list(range(12)), forks=[2])
    with caller.checks():
        rows = [(1, 12, 4, [], 0), (2, 12, 4, [], 0), (1, 13, 1, [], 0)]
        assert caller.append(*rows)[1] == [(2, Code.POSITION, 1, 12, 13)]
        assert caller.fork((1, 3), (3, 4), (2, 3))[1] == [(1, Code.NOT_FOUND, 3, 0, 0)]
        assert caller.free(1, 1)[1] == caller.truncate((1, 4), (1, 12))[1] == []
