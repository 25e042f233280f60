"""Followers of a pool's prefix index: snapshot, changes, and what happens to a slow one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from control_plane import limits
from control_plane.watching import Watcher
from kvplane.clients.prefix_feed import BlocksRemoved, BlocksStored, IndexCleared, read_events
from kvplane.errors import InvalidRequestError, RevisionTooOldError
from kvplane.wire.v1 import prefix_pb2 as pb
from tests.helpers.core.core_messages import DEVICE, POOL
from tests.helpers.core.core_model import Engine, World
from tests.helpers.refusals import refused


class Copy:
    """What a follower knows: tokens by hash and tier."""

    def __init__(self, world: World, tenant: str = "tenant", **request: object) -> None:
        self.num_wakes = 0
        self.held: dict[tuple[bytes, int], Sequence[int]] = {}
        self.revision = -1
        self.is_complete = False
        self.num_parts = 0
        self.follower: Watcher = world.core.watch(
            pb.WatchPrefixesRequest(pool_id=POOL, **request),  # type: ignore[arg-type]
            tenant,
            self._wake,
        )

    def _wake(self) -> None:
        self.num_wakes += 1

    def take(self) -> bool:
        """Apply one message, if there is one."""
        message = self.follower.take()
        if message is None:
            return False
        for event in read_events(message):
            if isinstance(event, IndexCleared):
                self.held.clear()
            elif isinstance(event, BlocksStored):
                for block in event.blocks:
                    self.held[block.block_hash, block.tier] = block.token_ids
            elif isinstance(event, BlocksRemoved):
                for key in event.blocks:
                    self.held.pop(key, None)
        self.num_parts += message.revision == 0
        self.is_complete = message.revision > 0
        if self.is_complete:
            assert message.revision >= self.revision
            self.revision = message.revision
        return True

    def catch_up(self) -> None:
        while self.take():
            pass


def write(engine: Engine, tokens: range) -> None:
    engine.cache(tokens)
    engine.world.core.take_notified()


def test_followers_that_begin_at_any_time_end_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.watching._MAX_ELEMENTS", 2)
    world = World()
    engine, early = world.engine(), Copy(world)
    early.catch_up()
    write(engine, range(41))
    late = Copy(world)
    assert late.take() and not late.is_complete, "five blocks come in parts"
    write(engine, range(100, 117))
    engine.forget(range(24))
    fresh = Copy(world)
    for copy in (fresh, early, late):
        copy.catch_up()
        assert copy.is_complete
        assert copy.held == fresh.held
    assert (len(fresh.held), world.usage()["cached"]) == (4, 4)
    assert late.num_parts > 1


def test_it_is_woken_by_changes_of_the_index_alone() -> None:
    world = World()
    engine = world.engine()
    copy = Copy(world)
    copy.catch_up()
    write(engine, range(9))
    assert copy.num_wakes == 1
    engine.renew()
    world.core.take_notified()
    assert copy.num_wakes == 1
    copy.catch_up()
    assert len(copy.held) == 1


def test_it_sees_its_own_tenant_and_namespace_alone() -> None:
    world = World()
    copies = [Copy(world), Copy(world, namespace="lora"), Copy(world, "other")]
    write(world.engine(), range(17))
    write(world.engine(namespace="lora"), range(25))
    for copy in copies:
        copy.catch_up()
    assert [len(copy.held) for copy in copies] == [2, 3, 0]
    assert {tier for _, tier in copies[0].held} == {DEVICE}


def test_one_that_is_too_slow_has_to_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NUM_KEPT_CHANGES", 4)
    world = World()
    copy = Copy(world)
    copy.catch_up()
    for i in range(5):
        write(world.engine(), range(100 * i, 100 * i + 9))
    with refused(RevisionTooOldError, "since_revision"):
        copy.take()


def test_it_goes_on_from_a_revision() -> None:
    world = World()
    write(world.engine(), range(17))
    first = Copy(world)
    first.catch_up()
    write(world.engine(), range(100, 109))
    second = Copy(world, since_revision=first.revision, incarnation=world.incarnation)
    second.catch_up()
    assert len(second.held) == 1
    for wrong in (first.revision + 9, 2**40):
        ahead = Copy(world, since_revision=wrong, incarnation=world.incarnation)
        with pytest.raises(RevisionTooOldError):
            ahead.take()
    with pytest.raises(RevisionTooOldError):
        Copy(world, since_revision=1, incarnation=world.incarnation + 1)
    with pytest.raises(InvalidRequestError):
        Copy(world, since_revision=-1)


def test_after_a_large_prefix_is_forgotten_it_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.prefixes._MOST_COUNTED", 1)
    monkeypatch.setattr("control_plane.pools.pool._SLICE_ENTRIES", 1)
    world = World()
    engine = world.engine()
    write(engine, range(25))
    write(engine, range(100, 109))
    copy = Copy(world)
    copy.catch_up()
    engine.forget(range(8))
    engine.admit(1, range(25))
    with pytest.raises(RevisionTooOldError):
        copy.take()
    again = Copy(world)
    again.catch_up()
    assert not again.is_complete, "what is forgotten is not told"
    assert not again.held
    world.work()
    assert again.num_wakes > 0
    engine.settle()
    again.catch_up()
    assert len(again.held) == 4


def test_a_data_plane_that_restarts_clears_it_and_a_snapshot_follows() -> None:
    world = World()
    write(world.engine(), range(17))
    world.pump()
    copy, old = Copy(world), Copy(world)
    copy.catch_up()
    old.catch_up()
    world.shards[0].restart()
    world.shards[0].register()
    world.core.take_notified()
    copy.catch_up()
    assert copy.held == {}
    world.shards[0].come()
    world.core.take_notified()
    write(world.engine(), range(100, 109))
    copy.catch_up()
    assert copy.is_complete
    assert len(copy.held) == 1
    stale = Copy(world, since_revision=old.revision, incarnation=world.incarnation)
    with pytest.raises(RevisionTooOldError):
        stale.take()
