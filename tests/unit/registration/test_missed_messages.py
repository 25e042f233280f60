"""A shard that comes back is sent all publications again: in slices, while everything goes on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from control_plane.pools import pool
from control_plane.pools.publications import publish_message, root_of
from kvplane import ops
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from tests.helpers.core.core_data_plane import DataPlane
from tests.helpers.core.core_messages import publications_of
from tests.helpers.core.core_model import World
from tests.helpers.planning.registration_messages import LAYOUT, TENANT

BLOCK_TOKENS = 8
SLICE_BLOCKS = 1024
ROOT = root_of(LAYOUT.fingerprint, TENANT, "")


def found(world: World) -> set[tuple[int, int]]:
    """Return blocks that hold what can be found, and their generations."""
    runs, *_ = world.pool.primary.publications_in(0, 1 << 32)
    return {ref for run in runs for ref in named_by(publish_message(run))}


def named_by(message: rpb.RegisterResponse) -> list[tuple[int, int]]:
    """Return the blocks that a message publishes, and their generations."""
    return [prefix.block for _, prefix in publications_of(message.publish.publications)]


def published(plane: DataPlane) -> set[tuple[int, int]]:
    """Return blocks that a data plane knows to be published, and their generations."""
    return {prefix.block for _, prefix in plane.published.values()}


def come_back(world: World, num_blocks: int, **fields: Any) -> DataPlane:
    """Return a data plane that has missed all that was published."""
    plane = DataPlane(world, num_device_blocks=num_blocks, **fields)
    plane.join()
    while not world.pool.built:
        world.core.work()
    engine = world.engine(TENANT)
    for first in (0, 10**6):
        engine.cache(range(first, first + BLOCK_TOKENS * 1200))
    plane.take()
    plane.leave()
    assert plane.register().resumed
    return plane


def slices(plane: DataPlane) -> list[list[rpb.RegisterResponse]]:
    return [*iter(lambda: plane.world.core.take_missed(*plane.key[:2]), None)]


def test_each_publication_is_sent_once_a_thousand_blocks_at_a_time() -> None:
    world = World(0)
    plane = come_back(world, 2500)
    sent = slices(plane)
    named = [[ref for message in slice for ref in named_by(message)] for slice in sent]
    assert len(sent) == -(-2500 // SLICE_BLOCKS)
    assert max(map(len, named)) == SLICE_BLOCKS
    assert sorted(itertools.chain.from_iterable(named)) == sorted(found(world))
    assert len(found(world)) == 2400
    assert max(message.ByteSize() for slice in sent for message in slice) < 2**20
    assert slices(plane) == []


def test_a_stream_that_breaks_again_begins_again() -> None:
    world = World(0)
    plane = come_back(world, 2500)
    assert world.core.take_missed(*plane.key[:2])
    plane.leave()
    assert slices(plane) == []
    assert plane.register().resumed
    plane.pump()
    assert published(plane) == found(world)


def test_what_is_published_and_forgotten_meanwhile_is_told_in_order() -> None:
    world = World(0)
    plane = come_back(world, 2500)
    engine, native = world.engine(TENANT), world.pool.native
    prompt = ops.pack_tokens(list(range(BLOCK_TOKENS * 600)))
    num_slices = 0
    while (slice := world.core.take_missed(*plane.key[:2])) is not None:
        for message in slice:
            plane.obey(message)
        num_slices += 1
        if num_slices == 1:
            native.forget(engine.session.root, prompt, False, 10**6)
            world.pool.forget_some()
        engine.write([5 * 10**6 + num_slices] * BLOCK_TOKENS)
    while world.pool.is_forgetting:
        world.pool.work_some()
    plane.pump()
    assert published(plane) == found(world)
    assert len(plane.published) == 599 + 1200 + num_slices
    world.pool.primary.check_integrity()


def test_nothing_is_published_that_is_forgotten_in_slices_meanwhile() -> None:
    world = World(0)
    plane = come_back(world, 2500)
    prompt = ops.pack_tokens(list(range(BLOCK_TOKENS * 600)))
    world.pool.native.forget(ROOT, prompt, False, 100)
    for slice in slices(plane):
        for message in slice:
            plane.obey(message)
        assert published(plane) <= found(world)
    assert published(plane) == found(world)
    assert len(plane.published) == 599 + 1200
    world.pool.primary.check_integrity()


def test_what_was_forgotten_while_it_was_away_is_withdrawn() -> None:
    world = World(0)
    plane = come_back(world, 2500)
    plane.pump()
    plane.leave()
    forget(world, first_token=0)
    world.pool.announce()
    assert plane.register().resumed
    plane.pump()
    assert published(plane) == found(world)
    assert len(plane.published) == 1200


def test_files_are_forgotten_behind_blocks_that_were_withdrawn_while_it_was_away() -> None:
    """Until then it may write them again."""
    world = World(0)
    plane = come_back(world, 2500, has_file_tier=True)
    slices(plane)
    plane.leave()
    forget(world, first_token=10**6)
    world.pool.shards.forget_files(rpb.ForgetFiles(tenant="default"))
    world.pool.announce()
    assert plane.register().resumed
    told = world.core.take_missed(*plane.key[:2]) or []
    world.pool.shards.forget_files(rpb.ForgetFiles(tenant="default", namespace="late"))
    told += plane.take()
    numbered = [i for i, message in enumerate(told) if message.forget_files.forget_id]
    assert [told[i].forget_files.namespace for i in numbered] == ["", "late"]
    assert max(i for i, message in enumerate(told) if message.HasField("withdraw")) < numbered[0]


def test_files_are_forgotten_when_the_last_block_was_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call sends one message of withdrawals, so that no call takes long."""
    monkeypatch.setattr(pool, "_MAX_WITHDRAWN", 500)
    world = World(0)
    plane = come_back(world, 2500, has_file_tier=True)
    plane.pump()
    forget(world, first_token=0)
    world.pool.shards.forget_files(rpb.ForgetFiles(tenant="default"))
    told = list(itertools.chain.from_iterable(iter(plane.take, [])))
    kinds = ["forget" if x.forget_files.forget_id else x.WhichOneof("message") for x in told]
    assert kinds == ["forget_files", *["withdraw"] * 3, "forget"]


def forget(world: World, first_token: int) -> None:
    """A prompt of a block, and all that goes on from it."""
    prompt = ops.pack_tokens(list(range(first_token, first_token + BLOCK_TOKENS)))
    world.pool.native.forget(ROOT, prompt, False, 10**6)
    world.pool.forget_some()
    while world.pool.is_forgetting:
        world.pool.work_some()
