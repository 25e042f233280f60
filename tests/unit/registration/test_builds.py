"""Pools that are large are built from reports in slices, between other work."""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.registration.registration import _SMALL_BLOCKS
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_model import World
from tests.helpers.planning.registration_messages import (
    Prefix,
    blocks,
    chain,
    half,
    publications,
)

NUM_BLOCKS = _SMALL_BLOCKS + 1000
LENGTH = 10  # blocks of a prompt


def prompts() -> Iterator[tuple[range, list[Prefix]]]:
    """As many as the pool has room for: their tokens and their blocks."""
    for first in range(0, NUM_BLOCKS - LENGTH, LENGTH):
        tokens = range(first * 8, (first + LENGTH) * 8)
        yield tokens, chain(tokens, [(first + i, 1) for i in range(LENGTH)])


def everything() -> rpb.BlockReport:
    prefixes = [prefix for _, of_prompt in prompts() for prefix in of_prompt]
    return rpb.BlockReport(
        blocks=[blocks({prefix.block[0]: 1 for prefix in prefixes})],
        publications=[publications(prefixes)],
        last=True,
    )


def slices(world: World) -> int:
    """Do all the work there is; how many slices it was."""
    num = 1
    while world.core.work():
        num += 1
    return num


def test_a_large_pool_is_ready_after_several_slices_with_all_that_was_reported() -> None:
    world = World(0)
    plane = Plane(world, num_device_blocks=NUM_BLOCKS)
    plane.register()
    plane.report(everything())
    assert not world.pool.ready
    assert slices(world) > 5
    assert world.pool.ready
    world.pool.primary.check_integrity()
    for tokens, prefixes in prompts():
        assert world.found(tokens) == [prefix.block[0] for prefix in prefixes]


def test_a_shard_that_restarts_while_the_pool_is_built_starts_the_build_over() -> None:
    world = World(0)
    left, right = (Plane(world, shard=half(i), num_device_blocks=NUM_BLOCKS) for i in range(2))
    left.join(everything())
    right.join(everything())
    world.core.work()
    assert not world.pool.ready
    later = Plane(world, shard=half(1), num_device_blocks=NUM_BLOCKS, epoch=12)
    later.join()
    assert "report_request" in left.kinds()
    slices(world)
    assert not world.pool.ready, "the other shard has not reported again"
    left.report(everything())
    slices(world)
    assert world.pool.ready
    tokens, _ = next(prompts())
    assert world.found(tokens) == [], "the later process holds nothing"


def test_a_shard_that_is_away_for_a_moment_does_not_stop_a_build() -> None:
    world = World(0)
    plane = Plane(world, num_device_blocks=NUM_BLOCKS)
    plane.join(everything())
    world.core.work()
    plane.leave()
    assert plane.register().resumed
    slices(world)
    assert world.pool.ready
    tokens, prefixes = next(prompts())
    assert world.found(tokens) == [prefix.block[0] for prefix in prefixes]
