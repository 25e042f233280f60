"""A pool is built from what its shards report. Which reports are believed is the native core's, in
``tests/unit/blocks/test_rebuilding.py``; here are whose they are, and what stays over processes.
"""

from __future__ import annotations

import pytest

from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_model import World
from tests.helpers.planning.registration_messages import (
    blocks,
    chain,
    half,
    publications,
    report,
)

A, C = range(24), range(200, 208)
PLACED = [(7, 3), (2, 9), (5, 1)]
"""Where the prompt ``A`` lies: blocks and their generations."""


def built_from(*parts: rpb.BlockReport) -> World:
    """A pool of one shard that reports these parts."""
    plane = Plane(World(0))
    plane.register()
    for part in parts:
        assert not plane.world.pool.ready
        plane.report(part)
    assert plane.world.pool.ready
    return plane.world


def test_prefixes_are_found_again_in_the_blocks_and_generations_reported() -> None:
    """In parts of any order, children before their parents."""
    first = rpb.BlockReport(publications=[publications(chain(A, PLACED)[::-1])])
    world = built_from(first, report({7: 3, 2: 9, 5: 1, 6: 4}))
    assert world.found(A) == [7, 2, 5]
    assert world.found(A, tenant="other") == world.found(A, namespace="lora") == []
    assert [world.generations()[i] for i in (7, 2, 5, 6, 0)] == [3, 9, 1, 4, 0]


def test_tenants_and_namespaces_are_restored_apart() -> None:
    owners = [("ann", ""), ("bob", ""), ("bob", "x"), ("a", "nn"), ("an", "n")]
    told = [
        publications(
            chain(C, [(i, 1)], tenant=tenant, namespace=namespace),
            tenant=tenant,
            namespace=namespace,
        )
        for i, (tenant, namespace) in enumerate(owners)
    ]
    everything = rpb.BlockReport(
        blocks=[blocks(dict.fromkeys(range(len(owners)), 1))], publications=told, last=True
    )
    world = built_from(everything)
    assert [world.found(C, *owner) for owner in owners] == [[i] for i in range(len(owners))]
    parent, child, _ = chain(A, PLACED)
    told = [publications([parent]), publications([child], tenant="other")]
    stolen = rpb.BlockReport(blocks=[blocks(dict(PLACED))], publications=told, last=True)
    world = built_from(stolen)
    assert world.found(A) == [7], "a child of another tenant's block is not restored"
    assert world.found(A, tenant="other") == []


@pytest.mark.parametrize("change", ["absent", "generation", "tenant"])
def test_a_prefix_is_restored_only_where_all_shards_report_the_same(change: str) -> None:
    world, prefixes, known = World(0), chain(A, PLACED), dict(PLACED)
    one, other = (Plane(world, shard=half(i)) for i in range(2))
    one.join(report(known, *prefixes))
    told = {"tenant": "other" if change == "tenant" else "default"}
    known[2] += change == "generation"
    del prefixes[1 : 2 if change == "absent" else 1]
    other.join(
        rpb.BlockReport(
            blocks=[blocks(known)], publications=[publications(prefixes, **told)], last=True
        )
    )
    assert world.pool.ready
    assert world.found(A) == ([] if change == "tenant" else [7])
    assert world.generations()[2] == known[2]


def test_a_shard_that_comes_back_smaller_and_then_larger_loses_no_generation() -> None:
    world, held = World(0), dict.fromkeys(range(16), 3)
    stays = Plane(world, shard=half(0), epoch=1)
    stays.join(report(held))
    for epoch, num_blocks in ((1, 16), (2, 8), (3, 16)):
        came = Plane(world, shard=half(1), epoch=epoch, num_device_blocks=num_blocks)
        came.join(report(held if epoch == 1 else None))
        if epoch > 1:
            assert stays.kinds() == ["report_request"]
            stays.report(report(held if epoch == 2 else None))
        assert world.pool.ready
        assert world.pool.num_blocks(tpb.TIER_DEVICE) == num_blocks
    # Each time the pool is built again, its blocks that hold nothing get another one.
    assert world.generations() == [5] * 8 + [4] * 8


def test_generations_of_a_process_that_came_in_between_are_final() -> None:
    """The first process holds publications of generations that another has used since."""
    world, first = (
        World(0),
        report(dict.fromkeys((7, 2, 5), 1), *chain(A, [(7, 1), (2, 1), (5, 1)])),
    )
    Plane(world, epoch=1).join(first)
    Plane(world, epoch=2).join()
    engine = world.engine()
    assert sorted(engine.write([900 + i])[0] for i in range(16)) == list(range(16))
    Plane(world, epoch=3).join(first)
    assert world.found(A) == []
    assert [world.generations()[i] for i in (7, 2, 5)] == [3, 3, 3]
