"""Families: an admission and the forks of it are one claim to device blocks."""

from __future__ import annotations

import pytest
from kvplane_blocks._native import (
    FAMILY_ENDED,
    FAMILY_ENDED_ON_HOST,
    FAMILY_LEFT_DEVICE,
    FAMILY_STARTED,
    LayerGroup,
    Pool,
)

from tests.helpers.native.native_pool import DEVICE, HOST, Caller, ints, new_pool


def with_forks() -> Caller:
    """A session with sequence 1, a fork 2 of it, and a fork 3 of that one, all written."""
    caller = Caller(new_pool(16, 16))
    with caller.step():
        caller.admit(1, list(range(6)), forks=[2])
    with caller.step():
        caller.fork((2, 3))
    assert events(caller) == [(FAMILY_STARTED, 1)]
    return caller


def events(caller: Caller) -> list[tuple[int, int]]:
    return list(caller.pool.take_family_events(caller.handle))


def step(caller: Caller, *freed: int, swapped: tuple[int, ...] = (), tier: int = HOST) -> None:
    with caller.step():
        if freed:
            caller.free(*freed)
        if swapped:
            assert isinstance(caller.swap(swapped, tier), int)


def test_forks_of_forks_are_in_the_family_until_the_last_is_gone() -> None:
    caller = with_forks()
    assert {caller.pool.family_of(caller.handle, i) for i in (1, 2, 3)} == {1}
    assert ints(caller.pool.family_on_device(caller.handle, 1), "q") == [1, 2, 3]
    step(caller, 1, 3)
    assert events(caller) == []
    step(caller, 2)
    assert events(caller) == [(FAMILY_ENDED, 1)]
    assert caller.pool.family_on_device(caller.handle, 1) == b""
    with caller.step():
        caller.admit(1, [7])
    assert events(caller) == [(FAMILY_STARTED, 2)], "a family's number is not used again"


def test_a_family_leaves_the_device_with_its_last_member() -> None:
    caller = with_forks()
    step(caller, swapped=(1, 2))
    assert events(caller) == []
    assert ints(caller.pool.family_on_device(caller.handle, 1), "q") == [3]
    step(caller, swapped=(3,))
    assert events(caller) == [(FAMILY_LEFT_DEVICE, 1)]
    with caller.step():
        caller.fork((3, 4))
    assert events(caller) == [], "a fork of it is on the host tier too"
    step(caller, swapped=(4,), tier=DEVICE)
    assert events(caller) == [(FAMILY_STARTED, 1)]
    step(caller, 4)
    assert events(caller) == [(FAMILY_LEFT_DEVICE, 1)]
    step(caller, 1, 2, 3)
    assert events(caller) == [(FAMILY_ENDED_ON_HOST, 1)]


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_an_abort_tells_once_where_families_are(tier: int) -> None:
    caller = with_forks()
    if tier == DEVICE:
        step(caller, swapped=(1, 2, 3))
    events(caller)
    with caller.in_flight():
        caller.swap([1, 2, 3], tier)
    there = FAMILY_STARTED if tier == DEVICE else FAMILY_LEFT_DEVICE
    back = FAMILY_LEFT_DEVICE if tier == DEVICE else FAMILY_STARTED
    assert events(caller) == [(there, 1)]
    caller.abort()
    assert events(caller) == [(back, 1)]


def test_what_is_undone_before_it_is_told_is_not_told() -> None:
    caller = with_forks()
    with caller.in_flight():
        caller.swap([1, 2, 3], HOST)
    caller.abort()
    assert events(caller) == []


def test_a_family_holds_what_its_members_on_the_device_hold() -> None:
    caller = with_forks()
    pool, handle = caller.pool, caller.handle
    assert pool.family_held(handle, 1) == 6, "two blocks of each of three tables"
    assert pool.num_device_blocks_held(handle) == 2
    step(caller, swapped=(1,))
    assert (pool.family_held(handle, 1), pool.num_device_blocks_held(handle)) == (4, 4)


def test_the_first_layer_group_alone_tells() -> None:
    groups = [LayerGroup(4, num, num) for num in (16, 8)]
    caller = Caller(Pool(groups))
    with caller.in_flight():
        caller.admit(1, list(range(6)))
    with caller.in_flight():
        caller.swap([1], HOST)
    caller.abort()
    assert caller.pool.family_on_device(caller.handle, 1) != b""
    assert caller.pool.family_held(caller.handle, 1) == 0, "nothing was written"
    assert list(Pool(groups[1:]).take_family_events(caller.handle)) == []
    assert events(caller) == [(FAMILY_STARTED, 1)]
    for group in groups:
        group.check_integrity()
