"""What the client is told of a pool's prefix index."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvplane.errors import (
    InvalidRequestError,
    PlaneUnavailableError,
    PoolNotFoundError,
    RevisionTooOldError,
)
from kvplane.prefixes import (
    BlocksRemoved,
    BlocksStored,
    CaughtUp,
    IndexCleared,
    StoredBlock,
)
from kvplane.wire import columns
from kvplane.wire.columns import INT32, UINT8
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.refusals import refused

DEVICE, HOST = tpb.TIER_DEVICE, tpb.TIER_HOST
NO_PARENT = bytes(16)


CLEARED = ppb.PrefixEvent(kind=ppb.PREFIX_EVENT_KIND_CLEARED)


def stored(*names: str, tier: int = DEVICE) -> ppb.PrefixEvent:
    """Blocks of one token, each the child of the one before."""
    hashes = [name.encode() * 16 for name in names]
    return ppb.PrefixEvent(
        kind=ppb.PREFIX_EVENT_KIND_STORED,
        hashes=b"".join(hashes),
        parent_hashes=b"".join([NO_PARENT, *hashes[:-1]]),
        token_ids=columns.pack(INT32, map(ord, names)),
        tiers=columns.pack(UINT8, [tier] * len(names)),
    )


def removal(name: str, tier: int = DEVICE) -> ppb.PrefixEvent:
    return ppb.PrefixEvent(
        kind=ppb.PREFIX_EVENT_KIND_REMOVED,
        hashes=name.encode() * 16,
        tiers=columns.pack(UINT8, [tier]),
    )


def message(revision: int, *events: ppb.PrefixEvent) -> ppb.WatchPrefixesResponse:
    """Events; ``revision``: 0 inside a snapshot."""
    return ppb.WatchPrefixesResponse(incarnation=5, events=events, revision=revision)


def snapshot(*names: str, revision: int = 7) -> ppb.WatchPrefixesResponse:
    """A snapshot of one message."""
    return message(revision, CLEARED, stored(*names))


async def take(num_events: int, feed: AsyncIterator[Any]) -> list[Any]:
    return [await anext(feed) for _ in range(num_events)]


def in_turn(*answers: Any) -> Any:
    """The nth call gets the nth answers."""
    calls: Iterator[Any] = iter(answers)
    return lambda _: next(calls)


def names(event: BlocksStored) -> str:
    return "".join(chr(block.token_ids[0]) for block in event.blocks)


async def test_a_follower_gets_a_snapshot_and_then_every_change(plane, client) -> None:
    move = stored("a", tier=HOST), removal("a")
    plane.script = in_turn(
        [
            snapshot("a", revision=0),
            message(7, stored("b")),
            message(9, *move),
            message(10),
            message(11, CLEARED),
            PlaneUnavailableError("over"),
        ]
    )
    got = await take(10, client.watch_prefixes("p", "lora"))
    assert got[0] == IndexCleared()
    assert got[1].blocks[0].parent_hash == NO_PARENT
    assert (names(got[1]), names(got[2]), got[3]) == ("a", "b", CaughtUp(7))
    (block,) = got[4].blocks
    assert (block.block_hash, block.token_ids[0], block.tier) == (b"a" * 16, ord("a"), HOST)
    assert got[5:8] == [BlocksRemoved(((b"a" * 16, DEVICE),)), CaughtUp(9), CaughtUp(10)]
    assert got[8:] == [IndexCleared(), CaughtUp(11)]
    assert plane.requests == [ppb.WatchPrefixesRequest(pool_id="p", namespace="lora")]


async def test_a_block_of_many_tokens_keeps_them_apart(plane, client) -> None:
    event = ppb.PrefixEvent(
        kind=ppb.PREFIX_EVENT_KIND_STORED,
        hashes=b"a" * 16 + b"b" * 16,
        parent_hashes=NO_PARENT + b"a" * 16,
        token_ids=columns.pack(INT32, [1, 2, 3, 4]),
        tiers=columns.pack(UINT8, [DEVICE, HOST]),
    )
    plane.script = in_turn([message(1, event)])
    got, _ = await take(2, client.watch_prefixes("p"))
    assert [list(block.token_ids) for block in got.blocks] == [[1, 2], [3, 4]]
    assert got.blocks[1] == StoredBlock(b"b" * 16, b"a" * 16, got.blocks[1].token_ids, HOST)


async def test_a_feed_that_breaks_goes_on_where_it_was(plane, client) -> None:
    plane.script = in_turn(
        [snapshot("a"), PlaneUnavailableError("gone")],
        [PlaneUnavailableError("still gone")],
        [PoolNotFoundError("its data plane is not back yet")],
        [message(8, removal("a"))],
    )
    got = await take(5, client.watch_prefixes("p"))
    assert got[2:] == [CaughtUp(7), BlocksRemoved(((b"a" * 16, DEVICE),)), CaughtUp(8)]
    assert [(r.since_revision, r.incarnation) for r in plane.requests] == [
        (0, 0),
        (7, 5),
        (7, 5),
        (7, 5),
    ]


async def test_a_feed_that_breaks_in_its_snapshot_starts_it_again(plane, client) -> None:
    plane.script = in_turn(
        [snapshot("a", revision=0), PlaneUnavailableError("gone")], [snapshot("a", "b")]
    )
    got = await take(5, client.watch_prefixes("p"))
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
    got = await take(6, client.watch_prefixes("p"))
    assert got[2:4] == [CaughtUp(7), IndexCleared()]
    assert (names(got[4]), got[5]) == ("b", CaughtUp(400))
    assert [request.since_revision for request in plane.requests] == [0, 0]


async def test_a_pool_that_was_never_there_is_no_reason_to_wait(plane, client) -> None:
    plane.script = in_turn([PoolNotFoundError("no such pool")])
    with pytest.raises(PoolNotFoundError):
        await anext(client.watch_prefixes("p"))


async def test_a_plane_that_stays_away_ends_the_feed(plane, client) -> None:
    plane.script = lambda _: [PlaneUnavailableError("gone")]
    with pytest.raises(PlaneUnavailableError):
        await anext(client.watch_prefixes("p", timeout_s=0.3))
    assert len(plane.requests) > 1


@pytest.mark.parametrize("column", ["hashes", "parent_hashes", "token_ids", "tiers"])
async def test_columns_that_differ_in_length_are_refused(plane, client, column: str) -> None:
    response = snapshot("a", "b", "c")
    event = response.events[1]
    value = getattr(event, column)
    setattr(event, column, value[: len(value) // 3] if column != "token_ids" else value[:8])
    plane.script = in_turn([response])
    with pytest.raises(InvalidRequestError):
        await take(3, client.watch_prefixes("p"))


async def test_an_event_of_a_later_release_is_refused(plane, client) -> None:
    later = ppb.PrefixEvent(kind=9)  # type: ignore[arg-type]
    plane.script = in_turn([message(1, later)])
    with refused(InvalidRequestError, "kind"):
        await anext(client.watch_prefixes("p"))
