"""What shards report reaches the native core column by column."""

from __future__ import annotations

from control_plane.pools.reports import Reports
from kvplane.wire import columns
from kvplane.wire.columns import INT64
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.registration_messages import LAYOUT, chain, report

SIZES = [{tpb.TIER_DEVICE: 4, tpb.TIER_HOST: 0}]


def built(reports: Reports) -> tuple[list[int], int]:
    """Generations of the device blocks, and how many hold a prefix."""
    (rebuild,) = reports.rebuilds
    rebuild.begin()
    while not rebuild.step(100):
        pass
    num_restored = rebuild.num_restored
    pool = rebuild.take()
    found = columns.read(INT64, pool.generations(tpb.TIER_DEVICE), "generations")
    return found.tolist(), num_restored


def test_what_a_shard_reported_before_it_began_again_is_dropped() -> None:
    reports = Reports(LAYOUT, 1)
    reports.start(0, SIZES)
    reports.add(0, SIZES, report({0: 5, 1: 5}, *chain(range(16), [(0, 5), (1, 5)])))
    reports.start(0, SIZES)
    reports.add(0, SIZES, report({2: 3}, *chain(range(8), [(2, 3)]), last=False))
    reports.add(0, SIZES, report({3: 9}))
    assert built(reports) == ([0, 0, 3, 9], 1)
