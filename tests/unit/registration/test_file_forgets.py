"""Files are deleted by every shard that has some, however often it or its process comes back."""

from __future__ import annotations

import pytest

from control_plane.pools import shards
from control_plane.pools.shards import FileForgets
from kvplane.wire.plane.v1 import registration_pb2 as rpb


def forget(forgets: FileForgets, namespace: str) -> None:
    told = forgets.add(rpb.ForgetFiles(tenant="t", namespace=namespace))
    assert [each.forget_files.forget_id for each in told] == [0], "the first asks for no answer"


def ids(messages: list[rpb.RegisterResponse]) -> list[int]:
    return [each.forget_files.forget_id for each in messages]


def test_what_is_told_again_is_repeated_until_each_shard_has_done_it() -> None:
    forgets = FileForgets()
    assert not forgets.is_due("t")
    forget(forgets, "a")
    assert forgets.has_early
    assert forgets.is_due("t")
    assert not forgets.is_due("other")
    assert forgets.of_shard(0) == []
    assert ids(forgets.second_notices([0, 2])) == [1]
    assert not forgets.has_early
    forget(forgets, "b")
    assert ids(forgets.second_notices([0, 2])) == [2]
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
    forgets.done(2, 2)
    assert forgets.is_due("t")
    forgets.done(2, 0)
    assert not forgets.is_due("t")


def test_a_shard_that_is_no_more_is_not_waited_for() -> None:
    forgets = FileForgets()
    forget(forgets, "a")
    forgets.second_notices([0, 1])
    forgets.done(1, 0)
    forget(forgets, "b")
    forgets.second_notices([0])
    assert forgets.of_shard(1) == []


def test_more_than_can_be_kept_forgets_all_files_of_the_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "MAX_WAITING", 2)
    forgets = FileForgets()
    forgets.add(rpb.ForgetFiles(tenant="other", namespace="x"))
    other = forgets.second_notices([0])
    for namespace in "abc":
        forget(forgets, namespace)
        told = forgets.second_notices([0])
    assert told[0].forget_files == rpb.ForgetFiles(tenant="t", all_namespaces=True, forget_id=4)
    assert forgets.of_shard(0) == other + told, "what another tenant forgot is as it was"
    forgets.done(4, 0)
    forgets.done(1, 0)
    forget(forgets, "d")
    forget(forgets, "e")
    assert len(forgets.second_notices([0])) == 2, "what is done does not count any more"


def test_one_step_of_many_forgets_leaves_other_tenants_alone() -> None:
    forgets = FileForgets()
    forgets.add(rpb.ForgetFiles(tenant="other", namespace="x"))
    for i in range(3 * shards.MAX_WAITING):
        forget(forgets, str(i))
    told = [each.forget_files for each in forgets.second_notices([0])]
    assert not any(each.all_tenants for each in told)
    assert len(told) <= 1 + shards.MAX_WAITING
    of_others = [each for each in told if each.tenant == "other"]
    assert [each.namespace for each in of_others] == ["x"]
    assert any(each.tenant == "t" and each.all_namespaces for each in told)


def test_a_prefix_too_long_to_be_kept_is_told_as_it_is_to_shards_that_are_there() -> None:
    forgets = FileForgets()
    prefix = rpb.ForgetFiles(tenant="t", namespace="a", token_ids=bytes(2048 * shards.MAX_WAITING))
    everything = rpb.ForgetFiles(tenant="t", all_namespaces=True)
    for number in (1, 2):
        [told] = forgets.add(prefix)
        assert told.forget_files == prefix
        [again] = forgets.second_notices([0, 1])
        prefix.forget_id = everything.forget_id = number
        assert again.forget_files == prefix
        forgets.done(number, 0)
        assert forgets.of_shard(0) == []
        [kept] = forgets.of_shard(1)
        assert kept.forget_files == everything
        prefix.forget_id = everything.forget_id = 0
        if number == 1:
            forgets.done(1, 1)
    [told] = forgets.add(prefix)
    assert told.forget_files == everything, "one that waits leaves no room for another"


def test_long_prefixes_count_by_their_length() -> None:
    forgets = FileForgets()
    for _ in range(3):
        forgets.add(rpb.ForgetFiles(tenant="t", token_ids=bytes(512 * 1024)))
    told = [each.forget_files for each in forgets.second_notices([0])]
    assert sum(len(each.token_ids) for each in told) <= shards.MAX_WAITING * 1024
    assert any(each.all_namespaces for each in told)
