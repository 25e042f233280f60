"""What people are shown of a pool is what is there."""

from __future__ import annotations

import pytest
from index_writer import Writer, blocks, checked_pool, hashes_of, ints
from kvplane_blocks import Pool

from control_plane.planning.views import STATES

DEVICE = 1


def states(pool: Pool, max_cells: int = 4096) -> list[str]:
    return [STATES[cell] for cell in pool.block_map(DEVICE, max_cells)[1]]


def test_each_block_has_the_state_that_the_usage_counts() -> None:
    with checked_pool(8) as pool:
        writer = Writer(pool, b"root")
        writer.cache(blocks(1, 2, 3))
        assert states(pool).count("cached") == 3
        assert states(pool).count("free") == 5
        num_blocks, num_free, num_cached, num_held, num_retired = pool.usage(DEVICE)
        assert (num_blocks, num_free, num_cached, num_held, num_retired) == (8, 5, 3, 0, 0)


def test_neighbours_share_a_cell_that_has_the_state_of_most() -> None:
    with checked_pool(8) as pool:
        Writer(pool, b"root").cache(blocks(1, 2, 3))
        per_cell, cells = pool.block_map(DEVICE, 3)
        assert (per_cell, len(cells)) == (3, 3)
        own = states(pool)
        for i, cell in enumerate(cells):
            part = own[3 * i : 3 * i + 3]
            assert part.count(STATES[cell]) == max(map(part.count, part))
        with pytest.raises(ValueError, match="at least 1"):
            pool.block_map(DEVICE, 0)


def test_prefixes_are_runs_that_branch_where_prompts_do() -> None:
    with checked_pool(16) as pool:
        writer = Writer(pool, b"root")
        prompts = [blocks(1, 2, 3, 4), blocks(1, 2, 5)]
        for prompt in prompts:
            writer.cache(prompt)
        is_whole, parents, device, host, hits, ages, idle, hashes = pool.prefix_tree(b"root", 100)
        assert is_whole
        assert ints(parents, "i") == [-1, 0, 0]
        assert sorted(ints(device, "i")) == [1, 2, 2]
        assert ints(host, "i") == [0, 0, 0]
        ends = {hashes[i : i + 16] for i in range(0, len(hashes), 16)}
        assert ends == {
            hashes_of(b"root", prompts[0])[1],
            hashes_of(b"root", prompts[0])[3],
            hashes_of(b"root", prompts[1])[2],
        }
        assert len(hits) == len(ages) == len(idle) == 3 * 8


def test_a_tree_ends_where_it_may_not_be_larger() -> None:
    with checked_pool(32) as pool:
        writer = Writer(pool, b"root")
        writer.cache(blocks(*range(10)))
        is_whole, parents, device, *_ = pool.prefix_tree(b"root", 4)
        assert (is_whole, ints(parents, "i"), ints(device, "i")) == (False, [-1], [4])
        assert pool.prefix_tree(b"nobody", 4)[:2] == (True, b"")
