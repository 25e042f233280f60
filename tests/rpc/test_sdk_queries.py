"""What the client asks without a number: of its session, and of a pool's prefix index."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvplane import ControlClient, Session, ops
from kvplane.clients.prefix_feed import (
    BlocksRemoved,
    BlocksStored,
    CaughtUp,
    IndexCleared,
    StoredBlock,
)
from kvplane.errors import (
    InvalidRequestError,
    PlaneUnavailableError,
    PoolNotFoundError,
    RevisionTooOldError,
)
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.v1 import control_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.sdk_peers import LAYOUT, SESSION, ScriptedControlPlane, serving

DEVICE, HOST = tpb.TIER_DEVICE, tpb.TIER_HOST
NO_PARENT = bytes(16)


@pytest.fixture
async def plane() -> ScriptedControlPlane:
    return ScriptedControlPlane()


@pytest.fixture
async def client(plane: ScriptedControlPlane) -> AsyncIterator[ControlClient]:
    async with serving(plane) as address, ControlClient(address) as client:
        yield client


@pytest.fixture
async def session(client: ControlClient) -> AsyncIterator[Session]:
    async with await client.open_session("p", LAYOUT) as session:
        yield session


async def test_operations_are_checked_without_a_number(plane, session) -> None:
    later = pb.OperationResult()
    later.failures.add(status=pb.OPERATION_STATUS_LATER)
    granted = pb.OperationResult(admit=pb.AdmitResult(num_cached_tokens=16, num_blocks=2))
    plane.script = lambda _: pb.CheckOperationsResponse(results=[granted, later])
    operations = [ops.admit(1, [5] * 20), ops.append(2, [7], 1, first_positions=9)]
    assert await session.check(operations) == [granted, later]
    (request,) = plane.requests
    assert (request.session, list(request.operations)) == (SESSION, operations)
    assert session.last_number == 0


async def test_a_cached_prefix_is_explained_block_by_block(plane, session) -> None:
    plane.script = lambda _: pb.ExplainPrefixResponse(
        tiers=columns.pack(UINT8, [HOST]),
        indices=columns.pack(INT32, [3]),
        generations=columns.pack(INT64, [2]),
        ref_counts=columns.pack(INT32, [0]),
        num_hits=columns.pack(INT64, [5]),
        ages_ms=columns.pack(INT64, [1500]),
        idle_ms=columns.pack(INT64, [500]),
        priorities=columns.pack(UINT8, [50]),
        num_cached_tokens=16,
    )
    (block,) = await session.explain_prefix([7] * 16)
    assert (block.tier, block.index, block.num_hits, block.age_s) == (HOST, 3, 5, 1.5)


async def test_prefixes_are_found_by_tokens_or_by_hashes(plane, client) -> None:
    match = pb.PoolMatch(pool_id="p", num_device_tokens=32, num_host_tokens=16, revision=9)
    plane.script = lambda _: pb.FindPrefixResponse(matches=[match])
    assert await client.find_prefix([1, 2], namespace="lora", pool_ids=["p", "q"]) == [match]
    await client.find_prefix(hashes=[b"a" * 16, b"b" * 16])
    by_tokens, by_hashes = plane.requests
    assert list(columns.read(INT32, by_tokens.token_ids, "")) == [1, 2]
    assert (by_tokens.namespace, list(by_tokens.pool_ids)) == ("lora", ["p", "q"])
    assert by_hashes == pb.FindPrefixRequest(hashes=b"a" * 16 + b"b" * 16)


def stored(*names: str, tier: int = DEVICE) -> pb.Stored:
    """Blocks of one token, each the child of the one before."""
    hashes = [name.encode() * 16 for name in names]
    return pb.Stored(
        hashes=b"".join(hashes),
        parent_hashes=b"".join([NO_PARENT, *hashes[:-1]]),
        token_ids=columns.pack(INT32, map(ord, names)),
        tiers=columns.pack(UINT8, [tier] * len(names)),
    )


def snapshot(*names: str, revision: int = 7, last: bool = True) -> pb.WatchResponse:
    part = pb.Snapshot(stored=stored(*names), last=last, revision=revision)
    return pb.WatchResponse(incarnation=5, snapshot=part)


def changed(revision: int, *changes: pb.Change) -> pb.WatchResponse:
    return pb.WatchResponse(incarnation=5, changes=pb.Changes(changes=changes, revision=revision))


def removal(name: str, tier: int = DEVICE) -> pb.Change:
    removed = pb.Removed(hashes=name.encode() * 16, tiers=columns.pack(UINT8, [tier]))
    return pb.Change(removed=removed)


async def take(num_events: int, feed: AsyncIterator[Any]) -> list[Any]:
    return [await anext(feed) for _ in range(num_events)]


def in_turn(*answers: Any) -> Any:
    """The nth call gets the nth answers."""
    calls: Iterator[Any] = iter(answers)
    return lambda _: next(calls)


def names(event: BlocksStored) -> str:
    return "".join(chr(block.token_ids[0]) for block in event.blocks)


async def test_a_follower_gets_a_snapshot_and_then_every_change(plane, client) -> None:
    move = pb.Change(stored=stored("a", tier=HOST)), removal("a")
    plane.script = in_turn(
        [
            snapshot("a", last=False),
            snapshot("b"),
            changed(9, *move),
            changed(10),
            changed(11, pb.Change(cleared=pb.Cleared())),
            PlaneUnavailableError("over"),
        ]
    )
    got = await take(10, client.watch("p", "lora"))
    assert got[0] == IndexCleared()
    assert got[1].blocks[0].parent_hash == NO_PARENT
    assert (names(got[1]), names(got[2]), got[3]) == ("a", "b", CaughtUp(7))
    (block,) = got[4].blocks
    assert (block.block_hash, block.token_ids[0], block.tier) == (b"a" * 16, ord("a"), HOST)
    assert got[5:8] == [BlocksRemoved(((b"a" * 16, DEVICE),)), CaughtUp(9), CaughtUp(10)]
    assert got[8:] == [IndexCleared(), CaughtUp(11)]
    assert plane.requests == [pb.WatchRequest(pool_id="p", namespace="lora")]


async def test_a_block_of_many_tokens_keeps_them_apart(plane, client) -> None:
    message = pb.Stored(
        hashes=b"a" * 16 + b"b" * 16,
        parent_hashes=NO_PARENT + b"a" * 16,
        token_ids=columns.pack(INT32, [1, 2, 3, 4]),
        tiers=columns.pack(UINT8, [DEVICE, HOST]),
    )
    part = pb.Snapshot(stored=message, last=True, revision=1)
    plane.script = in_turn([pb.WatchResponse(snapshot=part)])
    _, event, _ = await take(3, client.watch("p"))
    assert [list(block.token_ids) for block in event.blocks] == [[1, 2], [3, 4]]
    assert event.blocks[1] == StoredBlock(b"b" * 16, b"a" * 16, event.blocks[1].token_ids, HOST)


async def test_a_feed_that_breaks_goes_on_where_it_was(plane, client) -> None:
    plane.script = in_turn(
        [snapshot("a"), PlaneUnavailableError("gone")],
        [PlaneUnavailableError("still gone")],
        [PoolNotFoundError("its data plane is not back yet")],
        [changed(8, removal("a"))],
    )
    got = await take(5, client.watch("p"))
    assert got[2:] == [CaughtUp(7), BlocksRemoved(((b"a" * 16, DEVICE),)), CaughtUp(8)]
    assert [(r.since_revision, r.incarnation) for r in plane.requests] == [
        (0, 0),
        (7, 5),
        (7, 5),
        (7, 5),
    ]


async def test_a_feed_that_breaks_in_its_snapshot_starts_it_again(plane, client) -> None:
    plane.script = in_turn(
        [snapshot("a", last=False), PlaneUnavailableError("gone")], [snapshot("a", "b")]
    )
    got = await take(5, client.watch("p"))
    assert [type(event) for event in got] == [
        IndexCleared,
        BlocksStored,
        IndexCleared,
        BlocksStored,
        CaughtUp,
    ]
    assert [request.since_revision for request in plane.requests] == [0, 0]


async def test_a_follower_that_is_too_far_behind_gets_another_snapshot(plane, client) -> None:
    plane.script = in_turn(
        [snapshot("a"), RevisionTooOldError("too slow")], [snapshot("b", revision=400)]
    )
    got = await take(6, client.watch("p"))
    assert got[2:4] == [CaughtUp(7), IndexCleared()]
    assert (names(got[4]), got[5]) == ("b", CaughtUp(400))
    assert [request.since_revision for request in plane.requests] == [0, 0]


async def test_a_pool_that_was_never_there_is_no_reason_to_wait(plane, client) -> None:
    plane.script = in_turn([PoolNotFoundError("no such pool")])
    with pytest.raises(PoolNotFoundError):
        await anext(client.watch("p"))


async def test_a_plane_that_stays_away_ends_the_feed(plane, client) -> None:
    plane.script = lambda _: [PlaneUnavailableError("gone")]
    with pytest.raises(PlaneUnavailableError):
        await anext(client.watch("p", timeout_s=0.3))
    assert len(plane.requests) > 1


@pytest.mark.parametrize("column", ["hashes", "parent_hashes", "token_ids", "tiers"])
async def test_columns_that_differ_in_length_are_refused(plane, client, column: str) -> None:
    response = snapshot("a", "b", "c")
    message = response.snapshot.stored
    value = getattr(message, column)
    setattr(message, column, value[: len(value) // 3] if column != "token_ids" else value[:8])
    plane.script = in_turn([response])
    with pytest.raises(InvalidRequestError):
        await take(3, client.watch("p"))
