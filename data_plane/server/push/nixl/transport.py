"""Blocks go to other data planes by NIXL: the bytes, and nothing else.

    sender                       receiver
    PushStagedBlocks ── ticket ──► staging: which slots, and how to reach them
    slot ═══════ NIXL ═══════════► slot
    chunk: place, checksum, slot ─► the bytes are taken out, checked, written
         ◄── num_taken ──────────── the slot is free again

Where a slot cannot be written the bytes go in the chunk, unless NIXL alone is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Final

import grpc

from data_plane.server.push import chunks
from data_plane.server.push.counts import PushCounts
from data_plane.server.push.grpc_transport import GrpcTransport, PushChannels, of_receiver
from data_plane.server.push.nixl.outgoing import Outgoing
from data_plane.server.push.nixl.staging import NUM_SLOTS, Staging
from data_plane.server.push.sender import Chunks, Push
from data_plane.table_blocks import BlockRange
from kvplane.errors import InternalError, KvplaneError, PlaneUnavailableError
from kvplane.serving.observability.logs import frames_of
from kvplane.v1 import data_pb2, push_pb2, push_pb2_grpc
from kvplane.wire.error_codec import from_rpc_error

_LOGGER: Final = logging.getLogger(__name__)
_Request = push_pb2.PushStagedBlocksRequest


class NixlTransport:
    """Pushes by NIXL to receivers that have it, and by gRPC to others."""

    def __init__(
        self,
        staging: Staging,
        channels: PushChannels,
        counts: PushCounts,
        *,
        only: bool = False,
    ) -> None:
        """``only``: fail where it cannot be by NIXL."""
        self._staging = staging
        self._channels = channels
        self._grpc = GrpcTransport(channels)
        self._counts = counts
        self._only = only

    async def prepare(self, ticket: data_pb2.PushTicket) -> None:
        if ticket.takes_nixl:
            with suppress(PlaneUnavailableError):  # which the push is told again
                await asyncio.to_thread(self._staging.wait_until_ready)

    def push(self, ticket: data_pb2.PushTicket, opening: push_pb2.OpenPush, blocks: Chunks) -> Push:
        if ticket.takes_nixl:
            channel = self._channels.open(ticket.address)
            return _StagedPush(self._staging, channel, self._counts, self._only, opening, blocks)
        if self._only:
            raise PlaneUnavailableError(
                "the receiving data plane has no NIXL: start it with --push-transfer auto, or this "
                "one",
                field="ticket.takes_nixl",
            )
        return self._grpc.push(ticket, opening, blocks)


class _StagedPush:
    """A push on a thread of its own."""

    def __init__(
        self,
        staging: Staging,
        channel: grpc.Channel,
        counts: PushCounts,
        only: bool,
        opening: push_pb2.OpenPush,
        blocks: Chunks,
    ) -> None:
        self._staging = staging
        self._channel = channel
        self._counts = counts
        self._only = only
        self._opening = opening
        self._blocks = blocks
        self._requests: queue.SimpleQueue[push_pb2.PushStagedBlocksRequest | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._when_done: list[Callable[[Any], object]] = []
        self._has_ended = False
        self._answer: push_pb2.PushBlocksResponse | None = None
        self._failure: KvplaneError | None = None
        stub = push_pb2_grpc.BlockPushServiceStub(channel)
        self._call: Any = stub.PushStagedBlocks(iter(self._requests.get, None))
        self._call.add_done_callback(self._call_ended)
        self._thread = threading.Thread(target=self._run, name="push-nixl", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._call.cancel()

    def add_done_callback(self, done: Callable[[Any], object]) -> None:
        with self._lock:
            if not self._has_ended:
                self._when_done.append(done)
                return
        done(self)

    def result(self) -> push_pb2.PushBlocksResponse:
        if self._failure is not None:
            raise self._failure
        if self._answer is None:
            raise PlaneUnavailableError("the push was cancelled")
        return self._answer

    def close(self) -> None:
        self._channel.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._end(self._push(), None)
        except KvplaneError as error:
            self._end(None, error)
        except grpc.RpcError:
            pass  # it has ended
        except Exception as error:
            _LOGGER.error("unexpected error of a push error=%s", frames_of(error))
            self._end(None, InternalError("internal error; the sending server's log has more"))
        self._call.cancel()
        self._requests.put(None)

    def _call_ended(self, call: Any) -> None:
        """The receiver refuses or is gone, whatever the thread waits for."""
        if call.code() is not grpc.StatusCode.OK:
            self._end(None, of_receiver(from_rpc_error(call)))

    def _end(
        self, answer: push_pb2.PushBlocksResponse | None, failure: KvplaneError | None
    ) -> None:
        """What comes first counts."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended, self._answer, self._failure = True, answer, failure
        for done in self._when_done:
            done(self)

    def _push(self) -> push_pb2.PushBlocksResponse:
        self._requests.put(push_pb2.PushStagedBlocksRequest(open=self._opening))
        with ExitStack() as stack:
            outgoing = self._outgoing(stack, self._next().staging)
            most = NUM_SLOTS if outgoing is None else outgoing.num_slots
            for number, (place, data) in enumerate(self._blocks):
                if number >= most:  # the slot is free again when the chunk that had it was taken
                    self._next()
                chunk = None
                if outgoing is not None:
                    chunk = self._written(outgoing, number % most, place, data)
                    outgoing = outgoing if chunk is not None else None
                if chunk is None:
                    chunk = chunks.chunk_of(place, data)
                self._requests.put(push_pb2.PushStagedBlocksRequest(chunk=chunk))
            self._requests.put(None)
            while not (answer := self._next()).HasField("done"):
                pass
            return answer.done

    def _next(self) -> push_pb2.PushStagedBlocksResponse:
        answer: push_pb2.PushStagedBlocksResponse | None = next(self._call, None)
        if answer is None:
            raise PlaneUnavailableError("the receiving data plane ended the push without an answer")
        return answer

    def _outgoing(self, stack: ExitStack, staging: push_pb2.Staging) -> Outgoing | None:
        try:
            return stack.enter_context(self._staging.outgoing(staging))
        except KvplaneError as error:
            self._fall_back(error)
            return None

    def _written(
        self, outgoing: Outgoing, slot: int, place: BlockRange, data: memoryview
    ) -> push_pb2.BlockChunk | None:
        """The chunk, when its data is there."""
        try:
            outgoing.write(slot, data)
        except KvplaneError as error:
            self._fall_back(error)
            return None
        self._counts.moved_by_nixl("sent", len(data))
        return chunks.chunk_of(place, data, slot)

    def _fall_back(self, error: KvplaneError) -> None:
        if self._only:
            raise error
        _LOGGER.warning("blocks are sent by gRPC, not by NIXL error=%s", error.message)
