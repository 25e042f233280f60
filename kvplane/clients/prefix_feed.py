"""Follows a pool's prefix index: the blocks cached there, and each change to them.

A reader that applies the events in order has the pool's contents whenever ``CaughtUp`` comes. When
the connection breaks, the feed resumes where it was, or begins again with a snapshot if the changes
since then are no longer kept.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc.aio

from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    PlaneUnavailableError,
    PoolNotFoundError,
    RevisionTooOldError,
    UnavailableError,
)
from kvplane.transport.connection import typed_errors
from kvplane.transport.retry import FIRST_DELAY_S, MAX_DELAY_S, Deadline
from kvplane.wire import columns
from kvplane.wire.columns import INT32, UINT8
from kvplane.wire.v1 import control_pb2 as pb

HASH_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A cached block. ``block_hash`` names the prefix that ends with it, ``parent_hash`` the one
    before it: zero bytes for the first block of a prompt. ``token_ids``: of the block, int32.
    ``tier``: a ``types_pb2.Tier``.
    """

    block_hash: bytes
    parent_hash: bytes
    token_ids: array[int]
    tier: int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks can be found from now on. A known block is no change. Parents come before children,
    except between an ``IndexCleared`` and the ``CaughtUp`` after it, where there is no order.
    """

    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are gone from a tier: the hash and the tier of each. An unknown one is no change."""

    blocks: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True, slots=True)
class IndexCleared:
    """Nothing is cached any more, or a snapshot of everything that is follows."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The events so far make up the pool's contents at this revision."""

    revision: int


PrefixEvent: TypeAlias = BlocksStored | BlocksRemoved | IndexCleared | CaughtUp


async def follow(
    open_call: Callable[[pb.WatchRequest], Any], pool_id: str, namespace: str, timeout_s: float
) -> AsyncGenerator[PrefixEvent, None]:
    """Yield events until the generator is closed. ``open_call`` starts the RPC Watch.

    Raises PlaneUnavailableError or PoolNotFoundError when the plane, or the pool that was followed,
    has been away for ``timeout_s`` seconds, and any other error at once.
    """
    request = pb.WatchRequest(pool_id=pool_id, namespace=namespace)
    deadline, delay_s, was_there = Deadline.after(timeout_s), FIRST_DELAY_S, False
    while True:
        try:
            async with aclosing(_events(open_call(request), request)) as events:
                async for event in events:
                    deadline, delay_s, was_there = Deadline.after(timeout_s), FIRST_DELAY_S, True
                    yield event
        except RevisionTooOldError:
            request.since_revision = 0
        except KvplaneError as error:
            passes = isinstance(error, UnavailableError) or (
                was_there and isinstance(error, PoolNotFoundError)
            )
            if not passes or delay_s >= deadline.remaining_s:
                raise
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, MAX_DELAY_S)


async def _events(call: Any, request: pb.WatchRequest) -> AsyncGenerator[PrefixEvent, None]:
    """Yield the events of one call. Records their revision in ``request``."""
    reader = FeedReader()
    try:
        while True:
            with typed_errors():
                response = await call.read()
            if response is grpc.aio.EOF:
                raise PlaneUnavailableError("the peer ended the stream")
            for event in reader.read(response):
                if isinstance(event, CaughtUp):
                    request.since_revision = event.revision
                    request.incarnation = response.incarnation
                yield event
    finally:
        call.cancel()


class FeedReader:
    """Reads the messages of one stream, in order."""

    def __init__(self) -> None:
        self._in_snapshot = False

    def read(self, response: pb.WatchResponse) -> Iterator[PrefixEvent]:
        """Yield the next message's events. Raises InvalidRequestError if it is malformed."""
        if response.HasField("snapshot"):
            if not self._in_snapshot:
                yield IndexCleared()
            self._in_snapshot = not response.snapshot.last
            yield _stored(response.snapshot.stored)
            revision = response.snapshot.revision
        else:
            for change in response.changes.changes:
                yield _event(change)
            revision = response.changes.revision
        if not self._in_snapshot:
            yield CaughtUp(revision)


def _event(change: pb.Change) -> PrefixEvent:
    match change.WhichOneof("change"):
        case "stored":
            return _stored(change.stored)
        case "removed":
            hashes = columns.fixed(change.removed.hashes, HASH_BYTES)
            tiers = columns.read(UINT8, change.removed.tiers, "removed.tiers", length=len(hashes))
            return BlocksRemoved(tuple(zip(hashes, tiers, strict=True)))
        case "cleared":
            return IndexCleared()
        case _:
            raise InvalidRequestError("is not a change that is known here", field="changes")


def _stored(message: pb.Stored) -> BlocksStored:
    return BlocksStored(tuple(_blocks(message)))


def _blocks(message: pb.Stored) -> Iterator[StoredBlock]:
    hashes = columns.fixed(message.hashes, HASH_BYTES)
    parents = columns.fixed(message.parent_hashes, HASH_BYTES)
    tiers = columns.read(UINT8, message.tiers, "stored.tiers", length=len(hashes))
    tokens = columns.read(INT32, message.token_ids, "stored.token_ids")
    if len(parents) != len(hashes) or (len(tokens) % len(hashes) if hashes else tokens):
        raise InvalidRequestError("its columns differ in length", field="stored")
    size = len(tokens) // len(hashes) if hashes else 0
    for i, (block_hash, parent_hash, tier) in enumerate(zip(hashes, parents, tiers, strict=True)):
        yield StoredBlock(block_hash, parent_hash, tokens[i * size : (i + 1) * size], tier)
