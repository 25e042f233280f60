"""Random walks over the native core, which is checked after every step; see native_machine.py."""

from __future__ import annotations

from random import Random

import pytest

from tests.helpers.native.index_follower import Follower, held_now
from tests.helpers.native.native_machine import (
    GROUPED_SHAPES,
    ROOTS,
    SHAPES,
    Operation,
    Shape,
    Walk,
)
from tests.helpers.native.native_pool import DEVICE, HOST, dump, i32, ints, publications
from tests.helpers.native.native_sessions import Engine

NUM_KEPT_CHANGES = 12


class ForgettingWalk(Walk):
    """Prefixes are retained and forgotten all the time, and followers read what the index holds.

    It remembers which blocks were allocated when a prefix was forgotten.
    """

    ACTIONS = Walk.ACTIONS | {
        "retain": 6,
        "release": 3,
        "forget": 6,
        "forget_root": 1,
        "forget_some": 8,
        "tick": 3,
        "follow": 20,
    }

    def __init__(self, rng: Random, shape: Shape, policy: str, *, truncates: bool) -> None:
        super().__init__(rng, shape, policy)
        self.world.open(b"bob")
        self.truncates = truncates
        self.now_s = 0.0
        # (root, tokens of a forgotten prefix) -> generations of all blocks then
        self.forgotten: dict[tuple[bytes, tuple[int, ...]], dict[int, list[int]]] = {}
        group = self.world.cores[0]
        group.watch_enable(NUM_KEPT_CHANGES)
        self.followers = [Follower(group, root, shape.block_size) for root in sorted({*ROOTS})]
        self.snapshots = [each.take_snapshot(3) for each in self.followers]
        self.num_followed = 0

    def _truncate(self, engine: Engine) -> Operation:
        # What is written after a truncation lies in a block that was allocated before.
        return super()._truncate(engine) if self.truncates else self._append(engine)

    def abort(self) -> None:
        if self.truncates:  # an abort truncates too
            super().abort()

    def resync(self) -> None:
        if self.truncates:
            super().resync()

    def act(self) -> None:
        super().act()
        self.world.check_integrity()
        if not self.truncates:
            self.check_forgotten()

    def part(self) -> list[int]:
        tokens, size = self.prompt(), self.world.block_size
        return tokens[: size * self.rng.randint(1, max(1, len(tokens) // size))]

    def retain(self) -> None:
        self.world.pool.retain(
            self.rng.choice(ROOTS),
            self.rng.choice((1, 2)),
            i32(self.part()),
            self.rng.randint(1, 4),
            self.now_s + self.rng.randint(1, 30),
            self.rng.choice([2, 6, 100]),
        )

    def release(self) -> None:
        root, owner = self.rng.choice(ROOTS), self.rng.choice((1, 2))
        self.world.pool.release_retained(root, owner, i32(self.part()))

    def tick(self) -> None:
        self.now_s += self.rng.random() * 10
        self.world.pool.set_time(self.now_s)

    def forget(self) -> None:
        root, pool, tokens = self.rng.choice(ROOTS), self.world.pool, self.part()
        force = self.rng.random() < 0.6
        before = dump(pool, [])
        most = self.rng.choice([1, 1000])
        found, in_use = pool.forget(root, i32(tokens), force, most)
        assert 0 <= in_use <= found or (not force and found == 0)
        if in_use and not force:
            assert dump(pool, []) == before
        else:
            self.remember(root, tokens)

    def forget_root(self) -> None:
        pool, root = self.world.pool, self.rng.choice(ROOTS)
        pool.forget_roots([root], True)
        for token in (0, 1):
            self.remember(root, [token] * self.world.block_size)

    def forget_some(self) -> None:
        self.world.pool.forget_some(self.rng.choice([1, 2, 1000]))

    def remember(self, root: bytes, tokens: list[int]) -> None:
        size = self.world.block_size
        full = tuple(tokens[: len(tokens) // size * size])
        if full:
            pool = self.world.pool
            self.forgotten[root, full] = {
                tier: ints(pool.generations(tier), "q") for tier in (DEVICE, HOST)
            }

    def check_forgotten(self) -> None:
        """Of a forgotten prefix only blocks are found that were allocated since."""
        for (root, tokens), generations in self.forgotten.items():
            _, tiers, indices, found, *_ = self.world.pool.explain(root, i32(tokens))
            if len(tiers) == len(tokens) // self.world.block_size:
                tier, block = tiers[-1], ints(indices, "i")[-1]
                assert ints(found, "q")[-1] > generations[tier][block], (root, tokens)

    def follow(self) -> None:
        """Read on with a snapshot or the changes; who has read all knows what there is."""
        which = self.rng.randrange(len(self.followers))
        follower = self.followers[which]
        if next(self.snapshots[which], "ended") is None:
            return  # more of the snapshot is to come
        if not follower.follow(self.rng.randint(1, 4)):
            self.snapshots[which] = follower.take_snapshot(self.rng.randint(1, 4))
            return
        size, group = self.world.block_size, follower.group
        assert follower.held == held_now(group, follower.root, size, 10**6).held
        self.num_followed += len(follower.held) > 0
        for run in publications(group):
            hashes = {run[5][i : i + 16] for i in range(0, len(run[5]), 16)}
            assert run[0] != follower.root or {(each, DEVICE) for each in hashes} <= {
                *follower.held
            }

    def finish(self) -> None:
        super().finish()
        self.world.pool.set_time(self.now_s + 1000)
        assert [self.world.pool.num_retained(owner) for owner in (1, 2)] == [0, 0]


def walk(walk: Walk, num_steps: int) -> None:
    for _ in range(num_steps):
        walk.act()
        walk.world.check()
    walk.finish()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_walks(shape: Shape) -> None:
    for seed in range(10):
        walk(Walk(Random(seed), shape), num_steps=120)


@pytest.mark.parametrize("shape", GROUPED_SHAPES, ids=str)
def test_walks_of_several_groups(shape: Shape) -> None:
    for seed in range(10):
        walk(Walk(Random(seed), shape), num_steps=120)


@pytest.mark.parametrize("truncates", [False, True], ids=["never-truncates", "truncates"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_forgotten_comes_back_and_the_core_stays_sound(
    shape: Shape, truncates: bool
) -> None:
    num_forgotten = num_followed = 0
    for seed, policy in enumerate(("lru", "reuse-rate") * 2):
        forgetting = ForgettingWalk(Random(seed), shape, policy, truncates=truncates)
        walk(forgetting, num_steps=120)
        num_forgotten += len(forgetting.forgotten)
        num_followed += forgetting.num_followed
    assert num_forgotten > 0
    assert num_followed > 0


def test_what_a_plan_swaps_out_to_and_gives_up_it_does_not_allocate_again() -> None:
    (shape,) = (shape for shape in SHAPES if str(shape).startswith("1-200+40w70"))
    walk(Walk(Random(107), shape), num_steps=1000)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", [*SHAPES, *GROUPED_SHAPES], ids=str)
def test_long_walks(shape: Shape) -> None:
    for seed in range(100, 150):
        walk(Walk(Random(seed), shape), num_steps=1000)
