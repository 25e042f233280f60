"""A block report: every block that was ever allocated once, in parts of the size asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.plans.tables.block_tables import BlockTables, block_report
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import BLOCK_SIZE, DEVICE, HOST, blocks_of, publications

GENERATIONS = st.dictionaries(st.integers(0, 9), st.integers(1, 2**50), max_size=10)


def tables_of(generations: dict[pb.Tier, dict[int, int]]) -> BlockTables:
    tables = BlockTables({DEVICE: 10, HOST: 10}, BLOCK_SIZE)
    for tier, of_tier in generations.items():
        tables.allocate(tier, np.array([*of_tier], np.int64), np.array([*of_tier.values()]))
    return tables


@given(GENERATIONS, GENERATIONS, st.integers(1, 5))
def test_parts_add_up_to_all_generations(
    device: dict[int, int], host: dict[int, int], blocks_per_part: int
) -> None:
    parts = block_report(tables_of({DEVICE: device, HOST: host}), blocks_per_part)
    got: dict[int, list[tuple[int, int]]] = {DEVICE: [], HOST: []}
    for part in parts:
        for blocks in part.blocks:
            assert len(blocks_of(blocks)) <= blocks_per_part
            got[blocks.tier] += blocks_of(blocks)
    assert got == {DEVICE: sorted(device.items()), HOST: sorted(host.items())}
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize("blocks_per_part", [1, 2, 8])
def test_publications_come_after_all_generations(blocks_per_part: int) -> None:
    """A control plane checks them against these."""
    tables = tables_of({DEVICE: {0: 1, 1: 4, 2: 2}, HOST: {3: 1}})
    chain = publications((2, 2), (0, 1), (1, 4))
    assert tables.publications[0].keep(chain, tables.generations[DEVICE], "publications") == 3
    parts = block_report(tables, blocks_per_part)
    has_blocks = [bool(part.blocks) for part in parts]
    assert has_blocks == sorted(has_blocks, reverse=True)
    published = [block for part in parts for p in part.publications for block in blocks_of(p)]
    assert published == [(2, 2), (0, 1), (1, 4)]
