"""Follows a pool's prefix index: the blocks cached there, and each change to them.

A reader that applies the events in order has the pool's contents whenever ``CaughtUp`` comes. When
the connection breaks, the feed resumes where it was, or begins again with a snapshot if the changes
since then are no longer kept.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio

from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    PlaneUnavailableError,
    PoolNotFoundError,
    RevisionTooOldError,
    UnavailableError,
)
from kvplane.results import HASH_BYTES
from kvplane.transport.connection import typed_errors
from kvplane.transport.retry import FIRST_DELAY_S, MAX_DELAY_S, Deadline
from kvplane.wire import columns
from kvplane.wire.columns import INT32, UINT8
from kvplane.wire.v1 import prefix_pb2 as pb


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
    """Event: these blocks can be found from now on. A block that is known already is no change.
    Parents come before children, except between an ``IndexCleared`` and the ``CaughtUp`` after it,
    where there is no order.
    """

    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Event: blocks, given by hash and tier, are gone from that tier. An unknown one is
    no change.
    """

    blocks: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True, slots=True)
class IndexCleared:
    """Event: nothing is cached any more, or a snapshot of everything that is follows."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Event: the events so far make up the pool's contents at this revision."""

    revision: int


PrefixEvent: TypeAlias = BlocksStored | BlocksRemoved | IndexCleared | CaughtUp


async def follow(
    open_call: Callable[[pb.WatchPrefixesRequest], Any],
    pool_id: str,
    namespace: str,
    timeout_s: float,
) -> AsyncGenerator[PrefixEvent, None]:
    """Yield events of a pool's index until the generator is closed. ``open_call`` starts the RPC
    WatchPrefixes.

    Raises PlaneUnavailableError or PoolNotFoundError when the plane, or the pool that was followed,
    has been away for ``timeout_s`` seconds, and any other error at once.
    """
    request = pb.WatchPrefixesRequest(pool_id=pool_id, namespace=namespace)
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


async def _events(call: Any, request: pb.WatchPrefixesRequest) -> AsyncGenerator[PrefixEvent, None]:
    """Yield the events of one call, and record their revision in ``request``."""
    try:
        while True:
            with typed_errors():
                response = await call.read()
            if response is grpc.aio.EOF:
                raise PlaneUnavailableError("the peer ended the stream")
            for event in read_events(response):
                if isinstance(event, CaughtUp):
                    request.since_revision = event.revision
                    request.incarnation = response.incarnation
                yield event
    finally:
        call.cancel()


def read_events(response: pb.WatchPrefixesResponse) -> Iterator[PrefixEvent]:
    """Yield a message's events, then ``CaughtUp`` if they complete a revision. Raises
    InvalidRequestError if it is malformed.
    """
    for event in response.events:
        yield _event(event)
    if response.revision:
        yield CaughtUp(response.revision)


def _event(message: pb.PrefixEvent) -> PrefixEvent:
    if message.kind == pb.PREFIX_EVENT_KIND_CLEARED:
        return IndexCleared()
    hashes = columns.fixed(message.hashes, HASH_BYTES)
    tiers = columns.read(UINT8, message.tiers, "tiers", length=len(hashes))
    if message.kind == pb.PREFIX_EVENT_KIND_REMOVED:
        return BlocksRemoved(tuple(zip(hashes, tiers, strict=True)))
    if message.kind == pb.PREFIX_EVENT_KIND_STORED:
        return BlocksStored(tuple(_blocks(message, hashes, tiers)))
    raise InvalidRequestError("is not an event that is known here", field="kind")


def _blocks(
    message: pb.PrefixEvent, hashes: Sequence[bytes], tiers: array[int]
) -> Iterator[StoredBlock]:
    parents = columns.fixed(message.parent_hashes, HASH_BYTES)
    tokens = columns.read(INT32, message.token_ids, "token_ids")
    if len(parents) != len(hashes) or (len(tokens) % len(hashes) if hashes else tokens):
        raise InvalidRequestError("its columns differ in length", field="events")
    size = len(tokens) // len(hashes) if hashes else 0
    for i, (block_hash, parent_hash, tier) in enumerate(zip(hashes, parents, tiers, strict=True)):
        yield StoredBlock(block_hash, parent_hash, tokens[i * size : (i + 1) * size], tier)
