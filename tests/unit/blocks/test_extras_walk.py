"""Random walks over the native core in which prefixes are retained and forgotten all the time."""

from __future__ import annotations

from random import Random

import pytest

from tests.helpers.native.native_machine import ROOTS, SHAPES, Operation, Shape, Walk
from tests.helpers.native.native_pool import DEVICE, HOST, dump, i32, ints
from tests.helpers.native.native_sessions import Engine


class ForgettingWalk(Walk):
    """Also remembers which blocks were allocated when a prefix was forgotten."""

    ACTIONS = Walk.ACTIONS | {
        "retain": 6,
        "release": 3,
        "forget": 6,
        "forget_root": 1,
        "forget_some": 8,
        "tick": 3,
    }

    def __init__(self, rng: Random, shape: Shape, *, truncates: bool) -> None:
        super().__init__(rng, shape)
        self.truncates = truncates
        self.now_s = 0.0
        # (root, tokens of a forgotten prefix) -> generations of all blocks then
        self.forgotten: dict[tuple[bytes, tuple[int, ...]], dict[int, list[int]]] = {}

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


@pytest.mark.parametrize("truncates", [False, True], ids=["never-truncates", "truncates"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_forgotten_comes_back_and_the_core_stays_sound(
    shape: Shape, truncates: bool
) -> None:
    for seed in range(4):
        walk = ForgettingWalk(Random(seed), shape, truncates=truncates)
        for _ in range(120):
            walk.act()
            walk.world.check()
        assert walk.forgotten
        walk.finish()
