"""Calls of whoever follows the index: a snapshot of what a root holds, and the changes since."""

from __future__ import annotations

from tests.fuzz.pool_world import Call, Session, World

STORED, REMOVED = 1, 2
HASH_BYTES = 16
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
    world.followers[root] = Follower(world, root, 1 + data.ConsumeIntInRange(0, 3))


WATCH_CALLS: tuple[Call, ...] = (watch, follow)


class Follower:
    """Knows the hash and the tier of each block that a root holds."""

    def __init__(self, world: World, root: bytes, max_blocks: int) -> None:
        self.primary, self.root = world.cores[0], root
        self.held = held_now(world, root, max_blocks)
        self.revision = self.primary.revision

    def goes_on(self, max_events: int) -> bool:
        """With the changes since; False if it has to start again."""
        while True:
            changes = self.primary.changes_since(self.revision, self.root, max_events)
            if changes is None:
                return False
            self.revision, kinds, tiers, hashes, *_ = changes
            for kind, block in zip(kinds, _blocks(hashes, tiers), strict=True):
                if kind == STORED:
                    self.held.add(block)
                elif kind == REMOVED:
                    self.held.discard(block)
                else:
                    self.held.clear()
            if len(kinds) < max_events:
                return True


def held_now(world: World, root: bytes, max_blocks: int) -> set[tuple[bytes, int]]:
    """By a snapshot in pieces, once all that was forgotten is gone."""
    primary = world.cores[0]
    assert not primary.forget_some(ALL_ENTRIES)
    held: set[tuple[bytes, int]] = set()
    cursor = 0
    while cursor >= 0:
        cursor, _, tiers, hashes, *_ = primary.snapshot(root, cursor, max_blocks)
        held.update(_blocks(hashes, tiers))
    return held


def _blocks(hashes: bytes, tiers: bytes) -> list[tuple[bytes, int]]:
    places = range(0, len(hashes), HASH_BYTES)
    return [(hashes[i : i + HASH_BYTES], tiers[i // HASH_BYTES]) for i in places]


def check_followers(world: World) -> None:
    """They know what a new snapshot has, unless they are to start again."""
    for root, follower in world.followers.items():
        held = held_now(world, root, ALL_ENTRIES)
        assert not follower.goes_on(2) or follower.held == held
