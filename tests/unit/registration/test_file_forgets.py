"""Files are deleted by every shard that has some, however often it or its process comes back."""

from __future__ import annotations

import pytest

from control_plane.planning.pools import file_forgets
from control_plane.planning.pools.file_forgets import FileForgets
from kvplane.v1 import control_pb2 as cpb


def forget(forgets: FileForgets, namespace: str) -> None:
    told = forgets.add(cpb.ForgetFiles(tenant="t", namespace=namespace))
    assert [each.forget_files.forget_id for each in told] == [0], "the first asks for no answer"


def ids(messages: list[cpb.RegisterResponse]) -> list[int]:
    return [each.forget_files.forget_id for each in messages]


def test_what_is_told_again_is_repeated_until_each_shard_has_done_it() -> None:
    forgets = FileForgets()
    forget(forgets, "a")
    assert forgets.has_early
    assert forgets.of_shard(0) == []
    assert ids(forgets.told_again([0, 2])) == [1]
    assert not forgets.has_early
    forget(forgets, "b")
    assert ids(forgets.told_again([0, 2])) == [2]
    forgets.done(0, 0)  # the answer to what was told first
    forgets.done(1, 0)
    forgets.done(1, 0)
    assert (ids(forgets.of_shard(0)), ids(forgets.of_shard(1)), ids(forgets.of_shard(2))) == (
        [2],
        [],
        [1, 2],
    )
    forgets.done(1, 2)
    forgets.done(9, 2)
    assert ids(forgets.of_shard(2)) == [2]


def test_a_shard_that_is_no_more_is_not_waited_for() -> None:
    forgets = FileForgets()
    forget(forgets, "a")
    forgets.told_again([0, 1])
    forgets.done(1, 0)
    forget(forgets, "b")
    forgets.told_again([0])
    assert forgets.of_shard(1) == []


def test_more_than_can_be_kept_forgets_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_forgets, "MAX_WAITING", 2)
    forgets = FileForgets()
    for namespace in "abc":
        forget(forgets, namespace)
        told = forgets.told_again([0])
    assert told[0].forget_files.all_tenants
    assert ids(forgets.of_shard(0)) == ids(told) == [3]
