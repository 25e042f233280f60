"""What data planes are told of publications, a piece at a time."""

from __future__ import annotations

from native_pool import Caller, ints, new_pool

MOST_AT_ONCE = 16384


def test_what_is_below_a_spare_that_takes_over_is_announced_again_in_pieces() -> None:
    """Announcements name the parent's block, so those below it are told the new one."""
    num = 2 * MOST_AT_ONCE
    pool = new_pool(num + 2, block_size=1)
    short, long = Caller(pool), Caller(pool)
    prompt = [7, *[8] * num]
    for caller, tokens in ((short, prompt[:1]), (long, prompt)):
        caller.begin()
        assert len(caller.admit(1, tokens)) == 3
        caller.finish()
    for caller in (short, long):
        caller.receipted()
    while pool.has_publications:
        pool.take_publications(num)
    short.begin()
    short.free(1)
    short.finish()
    short.receipted()
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
