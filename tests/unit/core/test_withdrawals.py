"""What was forgotten is withdrawn at the data planes, so that no report brings it back."""

from __future__ import annotations

import pytest

from control_plane.config import CoreConfig
from kvplane import ops
from tests.helpers.core.core_model import World

TOKENS = range(32)


def cached_world(num_shards: int = 1) -> World:
    """Two blocks of one prompt are cached, and every data plane knows it."""
    world = World(num_shards=num_shards, config=CoreConfig(watermark=0.0))
    engine = world.engine()
    engine.admit(1, range(17))
    engine.settle()
    engine.send(ops.free([1]))
    engine.settle()
    world.pump()
    assert [len(shard.published) for shard in world.shards] == [2] * num_shards
    return world


@pytest.mark.parametrize("num_shards", [1, 2])
def test_every_data_plane_withdraws_what_is_forgotten(num_shards: int) -> None:
    world = cached_world(num_shards)
    world.engine().forget(list(range(8)))
    world.pump()
    assert [len(shard.published) for shard in world.shards] == [0] * num_shards


def test_a_control_plane_that_restarts_does_not_learn_what_was_forgotten() -> None:
    world = cached_world()
    world.engine().forget(list(range(8, 16)), force=True)  # of no cached prefix
    world.engine().forget(list(range(8)))
    world.pump()
    world.restart_control_plane()
    assert world.engine().lookup(range(17)) == 0


def test_what_is_published_again_under_the_same_tokens_stays() -> None:
    world = cached_world()
    engine = world.engine()
    engine.forget(list(range(8)))
    engine.admit(1, range(17))
    engine.settle()
    world.pump()
    world.restart_control_plane()
    assert world.engine().lookup(range(17)) == 16


def test_a_data_plane_that_was_away_withdraws_when_it_resumes() -> None:
    world = cached_world()
    engine = world.engine()
    engine.admit(1, range(100, 117))
    engine.settle()
    world.pump()
    engine.forget(list(range(8)))
    world.shards[0].leave()
    assert world.shards[0].join(), "it is resumed"
    world.pump()
    assert len(world.shards[0].published) == 2, "the other prompt's"
    world.restart_control_plane()
    assert world.engine().lookup(range(17)) == 0
    assert world.engine().lookup(range(100, 117)) == 16


def test_blocks_in_use_are_withdrawn_when_they_are_forgotten_by_force() -> None:
    world = cached_world()
    engine = world.engine()
    engine.admit(1, range(17))
    engine.settle()
    engine.forget(list(range(8)), force=True)
    world.pump()
    assert not world.shards[0].published
    world.restart_control_plane()
    assert world.engine().lookup(range(17)) == 0


def test_a_large_prefix_is_taken_apart_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.pools.pool._SLICE_ENTRIES", 1)
    world = cached_world()
    engine = world.engine()
    engine.forget(list(range(8)))
    assert engine.lookup(range(17)) == 0, "it is not found at once"
    world.core.take_notified()
    assert world.core.has_work()
    while world.core.work():
        world.core.check_integrity()
    assert world.usage()["cached"] == 0
    world.pump()
    assert not world.shards[0].published
