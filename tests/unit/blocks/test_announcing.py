"""What data planes are told of publications, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterable

from tests.helpers.native.index_writer import Writer, blocks, checked_pool, hashes_of
from tests.helpers.native.native_pool import Caller, OneGroup, i32, ints, new_pool

MOST_AT_ONCE = 16384
Run = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]


def hashes_in(runs: Iterable[Run]) -> set[bytes]:
    """The prefixes that data planes are told of."""
    return {run[5][i : i + 16] for run in runs for i in range(0, len(run[5]), 16)}


def hashes_in_blocks(pool: OneGroup, num_blocks: int) -> set[bytes]:
    """Those that are sent again."""
    runs, _, _, end = pool.publications_in(0, num_blocks)
    assert end == num_blocks
    return hashes_in(runs)


def test_what_is_below_a_spare_that_takes_over_is_announced_again_in_pieces() -> None:
    """Announcements name the parent's block, so those below it are told the new one."""
    num = 2 * MOST_AT_ONCE
    pool = new_pool(num + 2, block_size=1)
    short, long = Caller(pool), Caller(pool)
    prompt = [7, *[8] * num]
    for caller, tokens in ((short, prompt[:1]), (long, prompt)):
        with caller.in_flight():
            assert len(caller.admit(1, tokens)) == 3
    for caller in (short, long):
        caller.receipted()
    while pool.has_publications:
        pool.take_publications(num)
    with short.step():
        short.free(1)
    pool.check_integrity()

    other = Caller(pool, root=b"other")
    other.begin()
    other.admit(1, [9])  # takes the block of the short prompt, of which the long one has a spare
    table = [ref.index for ref in long.table(1) if ref]
    pieces = []
    while pool.has_publications:
        pieces.append(pool.take_publications(num))
    sizes = [sum(len(run[1]) // 4 for run in piece) for piece in pieces]
    assert max(sizes) <= MOST_AT_ONCE
    assert sum(sizes) == num + 1
    runs = [run for piece in pieces for run in piece]
    indices, parents = ([i for run in runs for i in ints(run[c], "i")] for c in (1, 3))
    assert indices == table
    assert parents == [-1, *table[:-1]]


def test_what_is_below_a_large_prefix_that_was_forgotten_is_not_announced() -> None:
    """Not while it is taken apart either."""
    with checked_pool(32) as pool:
        writer = Writer(pool)
        for prompt in (blocks(1, 2, 3, 4), blocks(1, 5), blocks(6)):
            writer.cache(prompt)
        left = {*hashes_of(b"root", blocks(1, 5)), *hashes_of(b"root", blocks(6))}
        assert len(hashes_in_blocks(pool, 32)) == 6
        pool.forget(writer.root, i32(blocks(1, 2)), False, 1)
        assert hashes_in(pool.take_publications(100)) == left
        assert hashes_in_blocks(pool, 32) == left
        while pool.forget_some(1):
            assert hashes_in_blocks(pool, 32) == left
        assert hashes_in_blocks(pool, 32) == left


def test_a_prefix_that_nobody_was_told_of_is_forgotten() -> None:
    """Nobody has asked for its hash either, which its parents are needed for."""
    with checked_pool(32) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1, 2, 3, 4))
        pool.forget(writer.root, i32(blocks(1, 2)), False, 1)
        pool.check_integrity()
        assert hashes_in(pool.take_publications(100)) == set(hashes_of(b"root", blocks(1)))
        while pool.forget_some(1):
            pool.check_integrity()


def test_what_can_be_found_beside_it_is_announced_in_pieces() -> None:
    """Each way from a block up to its root is walked meanwhile, and some of them are long."""
    length = 5 * MOST_AT_ONCE // 2
    num = 3 * length
    pool = new_pool(num + 3, block_size=1)
    caller = Caller(pool)
    with caller.step():
        prompts = ([8, 9, 9], [1] * length, [2] * length, [3] * length)
        for sequence_id, prompt in enumerate(prompts, 1):
            assert len(caller.admit(sequence_id, prompt)) == 3
    pool.forget(caller.root, i32([8]), True, 1)
    sizes, begin = [], 0
    while begin < num + 3:
        runs, _, _, begin = pool.publications_in(begin, num + 3)
        sizes.append(len(hashes_in(runs)))
    assert sum(sizes) == num
    assert 1 < len(sizes) < 10
    announced: set[bytes] = set()
    while pool.has_publications:
        taken = hashes_in(pool.take_publications(num))
        assert taken
        announced |= taken
    assert len(announced) == num
    pool.check_integrity()


def test_what_can_be_found_is_not_withdrawn_though_its_parent_is_not_on_the_device() -> None:
    """A sequence's window has passed the parent, which was evicted; its own block is in use."""
    pool = new_pool(8, window_tokens=6)
    caller, other = Caller(pool), Caller(pool)
    for first, tokens in ((0, list(range(16))), (16, [16])):
        with caller.step():
            if first == 0:
                assert len(caller.admit(1, tokens)) == 3
            else:
                caller.append((1, first, 1, tokens, 0))
    held = [ref.index for ref in caller.table(1) if ref]
    assert len(held) == 3
    with other.step():
        assert len(other.admit(1, list(range(100, 120)))) == 3  # takes all other blocks
    with other.step():
        other.free(1)
    pool.forget(other.root, i32(range(100, 104)), False, 1)
    runs, indices, _, _ = pool.publications_in(0, 8)
    assert not {*held[:2]} & {*ints(indices, "i")}, "they can be found"
    assert held[0] not in {i for run in runs for i in ints(run[1], "i")}, "its parent is not there"
    pool.check_integrity()
