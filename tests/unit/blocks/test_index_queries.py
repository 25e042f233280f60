"""Look-ups by tokens and by hashes agree, roots share nothing, and explain says what lies where."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.helpers.native.index_writer import BLOCK_TOKENS, Writer, blocks, checked_pool, hashes_of
from tests.helpers.native.native_pool import OneGroup, i32, ints


def match_hashes(pool: OneGroup, root: bytes, hashes: list[bytes]) -> tuple[int, int, bytes]:
    """Return how many blocks were found on the device and behind them, and their hashes."""
    (num_device, num_host), (found, *_) = pool.find(root, hashes=b"".join(hashes))
    return num_device, num_host, found


def test_hashes_of_another_root_find_nothing() -> None:
    with checked_pool(16) as pool:
        one, two = Writer(pool, b"one"), Writer(pool, b"two")
        one.cache(blocks(1, 2, 3))
        two.cache(blocks(1, 4))
        hashes = hashes_of(b"one", blocks(1, 2, 3))
        assert match_hashes(pool, b"one", hashes)[:2] == (3, 0)
        assert match_hashes(pool, b"two", hashes) == (0, 0, b"")
        assert match_hashes(pool, b"none", hashes) == (0, 0, b"")
        mixed = hashes_of(b"two", blocks(1))
        assert match_hashes(pool, b"two", mixed + hashes[1:])[:2] == (1, 0)


@pytest.mark.parametrize("order", [[1, 2], [0, 0], [0, 2, 1], [2, 1, 0]])
def test_hashes_that_are_no_chain_are_found_as_far_as_they_are(order: list[int]) -> None:
    with checked_pool(16) as pool:
        Writer(pool).cache(blocks(1, 2, 3))
        hashes = hashes_of(b"root", blocks(1, 2, 3))
        assert match_hashes(pool, b"root", [hashes[i] for i in order])[:2] == (
            int(order[0] == 0),
            0,
        )
        assert match_hashes(pool, b"root", [hashes[0], hashes[1][:15]])[:2] == (1, 0)


def test_explain_says_what_lies_where_and_how_it_was_used() -> None:
    with checked_pool(8, 4) as pool:
        writer = Writer(pool)
        pool.set_time(10)
        writer.cache(blocks(1, 2))
        pool.set_time(14)
        running = writer.write([*blocks(1), 7, 7])
        pool.set_time(15)
        pool.retain(writer.root, writer.owner, i32(blocks(1)), 8, 1e9, 10)
        hashes, *columns = pool.explain(b"root", i32([*blocks(1, 2, 3), 5]))
        assert hashes == b"".join(hashes_of(b"root", blocks(1, 2)))
        by_hashes = b"".join(hashes_of(b"root", blocks(1, 2, 3)))
        assert pool.find(b"root", hashes=by_hashes)[1] == (hashes, *columns)
        first_alone = pool.find(b"root", hashes=hashes[:16])[1]
        assert first_alone[1] == b"\x01"
        widths = ("B", "i", "q", "i", "q", "q", "q", "B")
        tiers, indices, generations, refs, hits, ages, idle, priorities = (
            ints(column, width) for column, width in zip(columns, widths, strict=True)
        )
        assert (tiers, refs, hits) == ([1, 1], [1, 0], [1, 0])
        assert (ages, idle, priorities) == ([5000, 5000], [0, 5000], [8, 0])
        _, table, of_table, _, _ = pool.table(writer.handle, running)
        assert (indices[0], generations[0]) == (ints(table, "i")[0], ints(of_table, "q")[0])
        assert all(not column for column in pool.explain(b"other", i32(blocks(1))))


PROMPT = (1, 2, 3, 4, 5)
BETWEEN: dict[str, Callable[[OneGroup, Writer], object]] = {
    "nothing": lambda pool, writer: None,
    "its tail is evicted": lambda pool, writer: writer.cache(blocks(7, 8, 9)),
    "most of it is evicted": lambda pool, writer: writer.cache(blocks(11, 12, 13, 14, 15, 16, 17)),
    "its middle is forgotten": lambda pool, writer: pool.forget(
        writer.root, i32(blocks(1, 2)), False, 99
    ),
    "all is forgotten": lambda pool, writer: pool.forget_roots([writer.root], False),
    "it is forgotten and cached again": lambda pool, writer: (
        pool.forget(writer.root, i32(blocks(1, 2)), False, 99),
        writer.cache(blocks(*PROMPT)),
    ),
    "it is used": lambda pool, writer: writer.write(blocks(*PROMPT)),
    "more of it is cached": lambda pool, writer: writer.cache(blocks(*PROMPT, 6)),
}


@pytest.mark.parametrize("num_host", [0, 4])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("num_slices", [1, 2, 5])
def test_a_search_in_slices_finds_what_there_is_when_it_ends(
    num_slices: int, between: str, num_host: int
) -> None:
    with checked_pool(8, num_host) as pool:
        writer = Writer(pool)
        writer.cache(blocks(*PROMPT))
        prompt = blocks(*PROMPT, 6)
        for by_hashes in (False, True):
            hashes = b"".join(hashes_of(writer.root, prompt)) if by_hashes else b""
            given = (b"", hashes) if by_hashes else (i32(prompt), b"")
            search = pool.search(pool.group, writer.root, *given, True)
            for _ in range(num_slices):
                search.search_some(1)
            if not by_hashes:
                BETWEEN[between](pool, writer)
            while search.search_some(1):
                pass
            counts, columns = search.counts(), search.blocks()
            assert (counts, columns) == pool.find(writer.root, i32(prompt))
            assert len(columns[1]) == sum(counts), "a tier for each block that is counted"


def test_memory_grows_by_what_is_said_a_block_and_an_entry() -> None:
    """In a process of its own: in this one, memory that it has had before is used again."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        resident, counted, num_bytes_blocks, num_bytes_entries, num_entries, num = fresh.submit(
            grow
        ).result()
    assert num_entries == num + 1
    assert 48 <= num_bytes_blocks / num <= 128
    assert 64 + 4 * BLOCK_TOKENS <= num_bytes_entries / num <= 160
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        return  # its red zones and its quarantine are resident too
    # The eviction policy's columns, the free list of ids and sequences are not counted.
    assert 0.7 < (resident[1] - resident[0]) / counted[0] < 2
    assert 0.7 < (resident[2] - resident[1]) / (counted[1] - counted[0]) < 2


def grow() -> tuple[list[int], list[int], int, int, int, int]:
    """Resident bytes before a pool, with it, and full; bytes counted; the pool's own counts."""
    num, resident = 200_000, [resident_bytes()]
    with checked_pool(num) as pool:
        counted = [sum(pool.memory()[:2])]
        resident.append(resident_bytes())
        writer = Writer(pool)
        for i in range(0, num, 1000):
            writer.cache([token for b in range(i, i + 1000) for token in blocks(b)])
        num_bytes_blocks, num_bytes_entries, num_entries = pool.memory()
        counted.append(num_bytes_blocks + num_bytes_entries)
        resident.append(resident_bytes())
    return resident, counted, num_bytes_blocks, num_bytes_entries, num_entries, num


def resident_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("Rss:"))
    return int(line.split()[1]) * 1024
