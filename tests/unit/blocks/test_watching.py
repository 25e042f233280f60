"""Changes of the index are told as they come, and snapshots have what it holds. The walk of
``test_native_walk.py`` follows both.
"""

from __future__ import annotations

import pytest

from tests.helpers.native.index_follower import REMOVED, STORED, Follower
from tests.helpers.native.index_writer import BLOCK_TOKENS, Writer, blocks, checked_pool, hashes_of
from tests.helpers.native.native_pool import HOST, i32, ints

NONE = bytes(16)


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
        follower = Follower(pool.group, b"root", BLOCK_TOKENS)
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
