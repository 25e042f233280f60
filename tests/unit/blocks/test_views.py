"""The map of blocks that people are shown is of what is there."""

from __future__ import annotations

import pytest

from control_plane.queries import STATES
from tests.helpers.native.index_writer import Writer, blocks, checked_pool
from tests.helpers.native.native_pool import OneGroup

DEVICE = 1


def states(pool: OneGroup, max_cells: int = 4096) -> list[str]:
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
