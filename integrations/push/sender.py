"""Sends blocks to other data planes.

    SendBlocks (event loop) ──► chunks, read one by one on the worker thread ──► receiver

The blocks of a chunk are read as a command of the session, in its turn: what the table has then,
and only what is written. The next chunk is read while one is on its way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

import grpc

from data_plane.blocks_from_outside import BlockRange, BlocksFromOutside, Lane
from kvplane.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    KvplaneError,
    NotPermittedError,
    PlaneUnavailableError,
)
from kvplane.transport.renewed import Renewed
from kvplane.transport.tls import Tls, credentials_of
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.protocol import CHANNEL_OPTIONS

from . import chunks, push_pb2
from .metrics import PushCounts
from .push_pb2_grpc import BlockPushServiceStub
from .tickets import PushSlots

Chunks = Iterator[tuple[BlockRange, memoryview]]

ANY_HOST: Final = "*"
STALL_S: Final = 30.0
"""How long a receiver may take nothing."""


class BlockSender:
    """Sends for one data plane."""

    def __init__(
        self,
        outside: BlocksFromOutside,
        counts: PushCounts,
        *,
        tls: Tls | None,
        hosts: Collection[str],
        max_pushes: int,
    ) -> None:
        """``tls``: how to reach receivers; None for in the clear. ``hosts``: that may be sent to;
        "*" for any. ``max_pushes``: of one caller.
        """
        self._outside = outside
        self._counts = counts
        self._credentials = None if tls is None else Renewed(lambda: credentials_of(tls), tls.files)
        self._options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS]
        if tls is not None and tls.server_name:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        self._hosts = hosts
        self._slots = PushSlots(max_pushes)

    async def send(
        self, lane: Lane, request: push_pb2.SendBlocksRequest
    ) -> push_pb2.SendBlocksResponse:
        """Send table entries of a session's sequence.

        Raises as ``BlocksFromOutside.read``, NotPermittedError for a host that is not to be sent
        to, QuotaExceededError for too many at one time, DeadlineExceededError when the receiver
        takes nothing for ``STALL_S``, and what the receiver refuses.
        """
        self._check(request.ticket)
        outcome = "CANCELLED"
        with self._slots.taken(lane.caller):
            try:
                answer = await self._push(lane, request)
                outcome = "OK"
            except KvplaneError as error:
                outcome = error.reason
                raise
            finally:
                self._counts.ended("sent", outcome)
        return push_pb2.SendBlocksResponse(
            num_bytes=answer.num_bytes,
            receipt=answer.receipt if answer.HasField("receipt") else None,
        )

    async def _push(
        self, lane: Lane, request: push_pb2.SendBlocksRequest
    ) -> push_pb2.PushBlocksResponse:
        loop, ticket = asyncio.get_running_loop(), request.ticket
        blocks = range(ticket.first_block, ticket.first_block + ticket.num_blocks)
        outside = self._outside
        pieces = chunks.cut(outside.layout, outside.shard, request.sequence_id, blocks)
        reading = _Reading(outside, self._counts, lane, pieces)
        # What cannot be read at all is refused before the ticket is used.
        await asyncio.wrap_future(reading.begin())
        opening = push_pb2.OpenPush(
            secret=ticket.secret,
            layout_fingerprint=outside.layout.fingerprint,
            shard=outside.shard.to_proto(),
        )
        channel = self._channel(ticket.address)
        push: Any = BlockPushServiceStub(channel).PushBlocks.future(
            _requests(opening, reading.blocks())
        )
        reading.when_failed = push.cancel
        if reading.failure is not None:  # it failed before there was anything to cancel
            push.cancel()
        ended = asyncio.Event()
        push.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
        try:
            while not ended.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), STALL_S / 4)
                if not ended.is_set() and reading.is_stalled:
                    raise DeadlineExceededError("the receiving data plane takes nothing")
        finally:
            push.cancel()
            loop.run_in_executor(None, channel.close)
        if reading.failure is not None:
            raise reading.failure
        return _answer(push)

    def _channel(self, address: str) -> grpc.Channel:
        """Return a connection for one push, to be closed by the caller."""
        if self._credentials is None:
            return grpc.insecure_channel(address, self._options)
        return grpc.secure_channel(address, self._credentials.get(), self._options)

    def _check(self, ticket: push_pb2.PushTicket) -> None:
        if not may_send_to(ticket.address, self._hosts):
            host = ticket.address.rpartition(":")[0]
            raise NotPermittedError(
                f"this data plane does not send to {host!r}: it is not in KVPLANE_PUSH_TO",
                field="ticket.address",
            )
        if ticket.num_blocks < 1 or ticket.first_block < 0:
            raise InvalidRequestError("must name at least one entry", field="ticket.num_blocks")


def _requests(opening: push_pb2.OpenPush, blocks: Chunks) -> Iterator[push_pb2.PushBlocksRequest]:
    yield push_pb2.PushBlocksRequest(open=opening)
    for place, data in blocks:
        yield push_pb2.PushBlocksRequest(chunk=chunks.chunk_of(place, data))


def _answer(push: Any) -> push_pb2.PushBlocksResponse:
    """Return the answer to a push that has ended. Raises KvplaneError."""
    try:
        answer: push_pb2.PushBlocksResponse = push.result(timeout=0)
    except grpc.RpcError as error:
        refused = from_rpc_error(push)
        raise type(refused)(
            f"the receiving data plane refused: {refused.message}",
            field=refused.field and f"ticket.{refused.field}",
            retry_delay_s=refused.retry_delay_s,
        ) from error
    except (grpc.FutureCancelledError, grpc.FutureTimeoutError) as error:
        raise PlaneUnavailableError("the push was cancelled") from error
    return answer


def may_send_to(address: str, hosts: Collection[str]) -> bool:
    """Whether blocks may go to ``address``, host:port. ``hosts``: as of ``BlockSender``."""
    host = address.rpartition(":")[0]
    # Of what gRPC takes for an address, neither a path nor a scheme.
    is_host = host != "" and "/" not in host and (":" not in host or host.startswith("["))
    allowed = {each.strip() for each in hosts}
    return is_host and not allowed.isdisjoint((host, ANY_HOST))


class _Reading:
    """The blocks of one push. Made on the event loop, read on a thread of the transport."""

    def __init__(
        self,
        outside: BlocksFromOutside,
        counts: PushCounts,
        lane: Lane,
        blocks: Iterator[BlockRange],
    ) -> None:
        self.failure: KvplaneError | None = None
        """Why a chunk could not be read."""
        self._given_s: float | None = None  # since when the receiver has yet to take something
        self.when_failed: Callable[[], Any] = lambda: None
        self._outside = outside
        self._counts = counts
        self._lane = lane
        self._blocks = blocks
        self._next: tuple[BlockRange, Future[memoryview]] | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether the receiver has taken nothing for too long."""
        given_s = self._given_s
        return given_s is not None and time.monotonic() - given_s >= STALL_S

    def begin(self) -> Future[memoryview]:
        """Read the first chunk."""
        self._next = first = self._read(next(self._blocks))
        return first[1]

    def blocks(self) -> Chunks:
        """What is sent. Ends early when a chunk cannot be read: ``failure`` says why then."""
        while self._next is not None:
            self._given_s = None
            try:
                blocks, data = self._next[0], self._next[1].result()
                following = next(self._blocks, None)
                self._next = None if following is None else self._read(following)
            except KvplaneError as error:
                self.failure = error
                self.when_failed()
                return
            self._counts.moved("sent", data.nbytes)
            self._given_s = time.monotonic()
            yield blocks, data

    def _read(self, blocks: BlockRange) -> tuple[BlockRange, Future[memoryview]]:
        return blocks, self._outside.read(self._lane, blocks)
