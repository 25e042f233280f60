"""A follower that has a snapshot and the changes since knows what the index holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.helpers.native.index_writer import BLOCK_TOKENS, Writer, blocks, checked_pool, hashes_of
from tests.helpers.native.native_pool import HOST, OneGroup, i32, ints, publications

STORED, REMOVED, CLEARED = 1, 2, 3
NONE = bytes(16)


class Follower:
    """What one root holds: (hash, tier) -> (parent's hash, tokens)."""

    def __init__(self, pool: OneGroup, root: bytes) -> None:
        self.pool, self.root = pool, root
        self.held: dict[tuple[bytes, int], tuple[bytes, bytes]] = {}
        self.revision = 0
        self.num_snapshots = 0

    def take_snapshot(self, max_blocks: int) -> Iterator[None]:
        """Pauses after each piece."""
        self.held.clear()
        self.num_snapshots += 1
        cursor = 0
        self.revision = -1
        while cursor >= 0:
            cursor, revision, *columns = self.pool.snapshot(self.root, cursor, max_blocks)
            if self.revision < 0:
                self.revision = revision
            for key, value in rows(*columns):
                self.held[key] = value
            yield

    def follow(self, max_events: int = 1000) -> bool:
        """Applies the changes; False if it has to start again."""
        while True:
            changes = self.pool.changes_since(self.revision, self.root, max_events)
            if changes is None:
                return False
            self.revision, kinds, tiers, hashes, parents, tokens = changes
            at = 0
            for i, kind in enumerate(kinds):
                key = (hashes[16 * i : 16 * i + 16], tiers[i])
                if kind == STORED:
                    size = 4 * BLOCK_TOKENS
                    self.held[key] = (parents[16 * i : 16 * i + 16], tokens[at : at + size])
                    at += size
                elif kind == REMOVED:
                    self.held.pop(key, None)
                else:
                    assert kind == CLEARED
                    self.held.clear()
            assert at == len(tokens)
            if len(kinds) < max_events:
                return True


def rows(
    tiers: bytes, hashes: bytes, parents: bytes, tokens: bytes
) -> Iterator[tuple[tuple[bytes, int], tuple[bytes, bytes]]]:
    size = 4 * BLOCK_TOKENS
    assert len(tiers) * 16 == len(hashes) == len(parents)
    assert len(tiers) * size == len(tokens)
    for i, tier in enumerate(tiers):
        part = slice(16 * i, 16 * i + 16)
        yield (hashes[part], tier), (parents[part], tokens[size * i : size * (i + 1)])


def test_changes_are_told_in_order_with_their_parents_and_tokens() -> None:
    with checked_pool(4) as pool:
        writer = Writer(pool)
        pool.watch_enable(100)
        writer.cache(blocks(1, 2))
        first, second = hashes_of(b"root", blocks(1, 2))
        changes = pool.changes_since(0, b"root", 100)
        expected = (2, b"\1\1", b"\1\1", first + second, NONE + first, i32(blocks(1, 2)))
        assert changes == expected
        assert pool.changes_since(0, b"root", 1) == (
            1, b"\1", b"\1", first, NONE, i32(blocks(1))
        )  # fmt: skip
        assert pool.changes_since(0, b"other", 100) == (2, b"", b"", b"", b"", b"")
        writer.cache(blocks(3, 4, 5))
        revision, kinds, tiers, hashes, parents, _ = pool.changes_since(2, b"root", 100)
        assert (revision, kinds, tiers) == (6, b"\2\1\1\1", b"\1\1\1\1")
        assert (hashes[:16], parents[:16]) == (second, NONE)
        pool.forget_roots([b"root"], False)
        assert pool.changes_since(6, b"root", 9) == (7, b"\3", b"\0", NONE, NONE, b"")


def test_a_spare_that_takes_a_place_is_no_change() -> None:
    with checked_pool(8) as pool:
        one, other = Writer(pool), Writer(pool)
        one.late = other.late = True
        first = one.write(blocks(1))
        other.write(blocks(1))
        one.catch_up()
        other.catch_up()
        pool.watch_enable(100)
        one.late = False
        one.free(first)
        one.write(blocks(*range(10, 17)))
        _, kinds, *_ = pool.changes_since(1, b"root", 100)
        assert kinds == b"\1" * 7


def test_a_copy_in_the_host_tier_is_told() -> None:
    with checked_pool(4, 4) as pool:
        writer = Writer(pool)
        pool.watch_enable(100)
        writer.cache(blocks(1))
        writer.write(blocks(2, 3, 4))
        writer.write([1, 2])
        _, kinds, tiers, hashes, _, _ = pool.changes_since(0, b"root", 100)
        (hash_,) = hashes_of(b"root", blocks(1))
        told = [(kinds[i], tiers[i]) for i in range(len(kinds)) if hashes[16 * i :][:16] == hash_]
        assert told == [(STORED, 1), (REMOVED, 1), (STORED, HOST)]


def test_a_revision_that_is_too_old_or_unknown_gives_nothing() -> None:
    with checked_pool(32) as pool:
        writer = Writer(pool)
        assert pool.changes_since(0, b"root", 9) is None
        writer.cache(blocks(1))
        pool.watch_enable(3)
        assert pool.changes_since(0, b"root", 9) is None
        writer.cache(blocks(2, 3, 4))
        assert len(pool.changes_since(1, b"root", 9)[1]) == 3
        writer.cache(blocks(5))
        assert pool.changes_since(1, b"root", 9) is None
        assert ints(pool.changes_since(2, b"root", 9)[5], "i") == blocks(3, 4, 5)
        assert pool.changes_since(pool.revision + 1, b"root", 9) is None
        pool.watch_enable(0)
        assert pool.changes_since(pool.revision, b"root", 9) is None


def test_the_name_of_a_root_goes_with_its_last_change() -> None:
    with checked_pool(32) as pool:  # which finds names that no change has
        pool.watch_enable(2)
        Writer(pool, b"root").cache(blocks(1))
        Writer(pool, b"other").cache(blocks(2, 3))
        assert len(pool.changes_since(pool.revision - 2, b"other", 9)[1]) == 2


@pytest.mark.parametrize("max_blocks", [1, 3, 1000])
def test_a_snapshot_in_pieces_has_one_root_only(max_blocks: int) -> None:
    with checked_pool(32) as pool:
        writer, other = Writer(pool), Writer(pool, b"other")
        writer.cache(blocks(1, 2, 3))
        other.cache(blocks(1, 4))
        follower = Follower(pool, b"root")
        assert len(list(follower.take_snapshot(max_blocks))) >= 3 // max_blocks
        hashes = hashes_of(b"root", blocks(1, 2, 3))
        assert [follower.held[(h, 1)] for h in hashes] == [
            (parent, i32(blocks(first)))
            for parent, first in zip([NONE, *hashes], (1, 2, 3), strict=False)
        ]
        assert len(follower.held) == 3
        assert pool.snapshot(b"none", 0, 10) == (-1, pool.revision, b"", b"", b"", b"")
        with pytest.raises(ValueError, match="cursor"):
            pool.snapshot(b"root", -1, 10)


class Watching(RuleBasedStateMachine):
    """Two followers of one root, of which one reads rarely, and one of another root."""

    def __init__(self) -> None:
        super().__init__()
        self.context = checked_pool(24, 8)
        self.pool = self.context.__enter__()
        self.pool.watch_enable(40)
        self.writers = [Writer(self.pool, root) for root in (b"a", b"b", b"a")]
        self.followers = [Follower(self.pool, root) for root in (b"a", b"b", b"a")]
        self.snapshots: list[Iterator[None] | None] = [None] * 3
        self.known: dict[bytes, set[tuple[int, ...]]] = {b"a": set(), b"b": set()}

    @rule(
        which=st.integers(0, 2),
        firsts=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    )
    def cache(self, which: int, firsts: list[int]) -> None:
        writer = self.writers[which]
        writer.cache(blocks(*firsts))
        self.known[writer.root] |= {tuple(firsts[:end]) for end in range(1, len(firsts) + 1)}

    @rule(which=st.integers(0, 1), firsts=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def forget(self, which: int, firsts: list[int]) -> None:
        self.pool.forget(self.writers[which].root, i32(blocks(*firsts)), True, 1000)

    @rule(which=st.integers(0, 1))
    def forget_root(self, which: int) -> None:
        self.pool.forget_roots([self.writers[which].root], True)

    @rule(num=st.integers(0, 9))
    def forget_some(self, num: int) -> None:
        self.pool.forget_some(num)

    @rule(which=st.integers(0, 2), num=st.integers(1, 4))
    def read(self, which: int, num: int) -> None:
        """Go on with a snapshot, or follow; start again if that is too late."""
        follower, snapshot = self.followers[which], self.snapshots[which]
        if snapshot is None and (not follower.num_snapshots or not follower.follow(num)):
            snapshot = self.snapshots[which] = follower.take_snapshot(num)
        if snapshot is not None and next(snapshot, "ended") == "ended":
            self.snapshots[which] = None

    @invariant()
    def followers_know_what_is_held(self) -> None:
        for i, follower in enumerate(self.followers):
            if self.snapshots[i] is None and follower.num_snapshots and follower.follow():
                fresh = Follower(self.pool, follower.root)
                assert len(list(fresh.take_snapshot(10**6))) == 1
                assert follower.held == fresh.held
                assert self.seen(follower.root) <= set(follower.held)

    def seen(self, root: bytes) -> set[tuple[bytes, int]]:
        """What look-ups find: leading blocks, on the device if they are in both tiers."""
        found = set()
        for firsts in self.known[root]:
            tiers = self.pool.explain(root, i32(blocks(*firsts)))[1]
            found |= set(zip(hashes_of(root, blocks(*firsts)), tiers, strict=False))
        for run in publications(self.pool):
            if run[0] == root:
                found |= {(run[5][i : i + 16], 1) for i in range(0, len(run[5]), 16)}
        return found

    def teardown(self) -> None:
        self.context.__exit__(None, None, None)


TestWatching = Watching.TestCase
TestWatching.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
