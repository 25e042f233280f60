"""Calls of whoever follows the index: a snapshot of what a root holds, and the changes since."""

from __future__ import annotations

from tests.fuzz.pool_world import Call, Session, World
from tests.helpers.native import index_follower
from tests.helpers.native.index_follower import Follower

ALL_ENTRIES = 10_000


def watch(world: World, _: Session) -> None:
    """From anywhere; also anew, so that followers have to start again."""
    primary = world.cores[0]
    if world.data.ConsumeIntInRange(0, 3) == 3:
        primary.watch_enable(world.unsigned(6, 64))
    primary.changes_since(world.number(20), world.root(), world.unsigned(3, 64))
    primary.snapshot(world.root(), world.number(12), world.unsigned(3, 64))


def follow(world: World, _: Session) -> None:
    """From now on; what a follower knows in the end is checked by ``check_followers``."""
    primary, data, root = world.cores[0], world.data, world.root()
    if primary.changes_since(primary.revision, root, 1) is None:
        primary.watch_enable(data.PickValueInList([3, 1000]))
    world.followers[root] = held_now(world, root, 1 + data.ConsumeIntInRange(0, 3))


WATCH_CALLS: tuple[Call, ...] = (watch, follow)


def held_now(world: World, root: bytes, max_blocks: int) -> Follower:
    """By a snapshot in pieces, once all that was forgotten is gone."""
    primary = world.cores[0]
    assert not primary.forget_some(ALL_ENTRIES)
    return index_follower.held_now(primary, root, world.block_tokens, max_blocks)


def check_followers(world: World) -> None:
    """They know what a new snapshot has, unless they are to start again."""
    for root, follower in world.followers.items():
        held = held_now(world, root, ALL_ENTRIES).held
        assert not follower.follow(2) or follower.held == held
