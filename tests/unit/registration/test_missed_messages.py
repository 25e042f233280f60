"""A shard that comes back is sent all publications again: in pieces, while everything goes on."""

from __future__ import annotations

import itertools

from registration_world import Plane, World

from kvplane import ops
from kvplane.v1 import control_pb2 as pb
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64

BLOCK_TOKENS = 8
PIECE_BLOCKS = 1024
Refs = set[tuple[int, int]]


def refs(message: pb.RegisterResponse) -> Refs:
    """Blocks and generations that a message names."""
    told = message.withdraw if message.HasField("withdraw") else message.publish.publications
    indices = columns.read(INT32, told.indices, "indices")
    return set(zip(indices, columns.read(INT64, told.generations, "generations"), strict=True))


def follow(published: Refs, messages: list[pb.RegisterResponse]) -> None:
    """What a data plane makes of messages."""
    for message in messages:
        if message.HasField("withdraw"):
            published -= refs(message)
        elif message.HasField("publish"):
            published |= refs(message)


def found(world: World) -> Refs:
    """Blocks that hold what can be found."""
    runs = world.pool.lead.all_publications(10**9)
    return {
        ref
        for _, indices, generations, *_ in runs
        for ref in zip(
            columns.read(INT32, indices, "indices"),
            columns.read(INT64, generations, "generations"),
            strict=True,
        )
    }


def come_back(world: World, num_blocks: int) -> Plane:
    plane = Plane(world, num_device_blocks=num_blocks)
    plane.join()
    while not world.pool.built:
        world.it.work()
    session = world.open_writer()
    for first in (0, 10**6):
        session.write(range(first, first + BLOCK_TOKENS * 1200))
        session.free()
    plane.take()
    plane.leave()
    assert plane.register().resumed
    return plane


def pieces(plane: Plane) -> list[list[pb.RegisterResponse]]:
    return [*iter(lambda: plane.world.it.take_missed(*plane.key[:2]), None)]


def test_each_publication_is_sent_once_a_thousand_blocks_at_a_time() -> None:
    world = World()
    plane = come_back(world, 2500)
    sent = pieces(plane)
    named = [[ref for message in piece for ref in refs(message)] for piece in sent]
    assert len(sent) == -(-2500 // PIECE_BLOCKS)
    assert max(map(len, named)) == PIECE_BLOCKS
    assert sorted(itertools.chain.from_iterable(named)) == sorted(found(world))
    assert len(found(world)) == 2400
    assert max(message.ByteSize() for piece in sent for message in piece) < 2**20
    assert pieces(plane) == []


def test_a_stream_that_breaks_again_begins_again() -> None:
    world = World()
    plane = come_back(world, 2500)
    assert world.it.take_missed(*plane.key[:2])
    plane.leave()
    assert pieces(plane) == []
    assert plane.register().resumed
    published: Refs = set()
    follow(published, plane.take())
    assert published == found(world)


def test_what_is_published_and_forgotten_meanwhile_is_told_in_order() -> None:
    world = World()
    plane = come_back(world, 2500)
    published: Refs = set()
    writer, native = world.open_writer(), world.pool.native
    prompt = ops.pack_tokens(list(range(BLOCK_TOKENS * 600)))
    num_pieces = 0
    while (piece := world.it.take_missed(*plane.key[:2])) is not None:
        follow(published, piece)
        num_pieces += 1
        if num_pieces == 1:
            native.forget(writer.slot, prompt, False, 10**6)
            world.pool.forget_some()
        writer.write([5 * 10**6 + num_pieces] * BLOCK_TOKENS)
    while world.pool.is_forgetting:
        world.pool.work_some()
    follow(published, plane.take())
    assert published == found(world)
    assert len(published) == 599 + 1200 + num_pieces
    world.pool.lead.check_integrity()


def test_what_was_forgotten_while_it_was_away_is_withdrawn() -> None:
    world = World()
    plane = come_back(world, 2500)
    published: Refs = set()
    follow(published, plane.take())
    plane.leave()
    writer = world.open_writer()
    prompt = ops.pack_tokens(list(range(BLOCK_TOKENS)))
    world.pool.native.forget(writer.slot, prompt, False, 10**6)
    world.pool.forget_some()
    while world.pool.is_forgetting:
        world.pool.work_some()
    world.pool.announce()
    assert plane.register().resumed
    follow(published, plane.take())
    assert published == found(world)
    assert len(published) == 1200
