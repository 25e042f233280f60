"""Takes blocks from other data planes: a gRPC server of its own, on threads.

    ReceiveBlocks (event loop) ──► ticket ──► sender
    PushBlocks (a thread) ◄── ticket, chunks ──┘
          └──► checksum ──► a write on the worker thread, in the turn of who got the ticket

Bytes come several times as fast as through the event loop of the other calls, and hold none of
them up. Each push has a chunk or two in memory, and there are only so many at one time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from data_plane.blocks_from_outside import BlockRange, BlocksFromOutside, Lane
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    LayoutMismatchError,
)
from kvplane.serving.callers.access import AccessList
from kvplane.serving.callers.identity import Gate
from kvplane.serving.certificates import ServerCertificate, ServerTls
from kvplane.serving.observability.logs import frames_of
from kvplane.serving.server import most_connections
from kvplane.shard import Shard
from kvplane.wire.error_codec import to_rich_status
from kvplane.wire.v1 import types_pb2 as tpb

from . import chunks, push_pb2
from .metrics import PushCounts
from .tickets import NUM_RESERVED, PushSlots, Ticket, Tickets

PEERS: Final = push_pb2.DESCRIPTOR.services_by_name["BlockPushService"]
PUSH_BLOCKS: Final = f"/{PEERS.full_name}/PushBlocks"
_LOGGER: Final = logging.getLogger(__name__)
# How long a sender may keep a push waiting in all, and how much longer for what it sends.
STALL_S: Final = 15.0
MIN_BYTES_PER_S: Final = 1 << 20
# How long until it shows its ticket.
OPEN_S: Final = 5.0
_IDLE_MS: Final = 10_000
_HANDSHAKE_MS: Final = 5_000
_OVERHEAD_BYTES: Final = 4096
# Each takes two threads while it lasts. More than the pushes that ``max_pushes`` may ask for.
_MOST_CALLS: Final = 512


class BlockReceiver:
    """Serves pushes from ``start`` to ``stop``."""

    def __init__(
        self,
        outside: BlocksFromOutside,
        access: AccessList,
        counts: PushCounts,
        *,
        bind: str,
        advertise: str = "",
        tls: ServerTls | None = None,
        max_pushes: int = 4,
    ) -> None:
        """Bind the address. ``advertise``: what tickets say; empty for the one bound.
        ``max_pushes``: of one caller.

        Raises OSError when the address cannot be bound or a TLS file cannot be read.
        """
        self.tickets = Tickets()
        self._outside = outside
        self._gate = Gate(access, [PEERS])
        self._counts = counts
        most = chunks.max_chunk_bytes(outside.layout, outside.shard) + _OVERHEAD_BYTES
        self._slots = PushSlots(max_pushes)
        num_connections = min(16 * max_pushes, most_connections())
        num_streams = max_pushes + NUM_RESERVED
        # As many as there can be at one time, or many: who shows no ticket keeps nobody out for
        # longer than ``OPEN_S``.
        num_calls = min(num_connections * num_streams, _MOST_CALLS)
        self._threads = ThreadPoolExecutor(num_calls, "push")
        self._server = grpc.server(
            self._threads,
            options=[
                ("grpc.max_receive_message_length", most),
                ("grpc.compression_enabled_algorithms_bitset", 1),
                ("grpc.max_allowed_incoming_connections", num_connections),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
                ("grpc.max_concurrent_streams", num_streams),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
            ],
            maximum_concurrent_rpcs=num_calls,
        )
        host = bind.rpartition(":")[0]
        try:
            if tls is not None:
                port = self._server.add_secure_port(bind, ServerCertificate(tls).credentials())
            else:
                port = self._server.add_insecure_port(bind)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {bind}") from error
        self.address = advertise or f"{host}:{port}"
        """Where other data planes connect to."""
        # They are given bytes: what gRPC itself cannot decode would be an internal error.
        push: Any = grpc.stream_unary_rpc_method_handler(
            self._push, response_serializer=push_pb2.PushBlocksResponse.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler(PEERS.full_name, {"PushBlocks": push})
        self._server.add_generic_rpc_handlers((handler,))

    def start(self) -> None:
        """Take pushes."""
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Take no more; those under way have ``grace_s`` to end. Returns when they have."""
        self._server.stop(grace_s).wait()
        self._threads.shutdown()

    def give(
        self, lane: Lane, plan_number: int, sequence_id: int, blocks: range
    ) -> push_pb2.PushTicket:
        """A ticket for ``blocks``, the span of a session's latest plan for a sequence. Raises
        QuotaExceededError.
        """
        size = chunks.num_bytes(self._outside.layout, self._outside.shard, len(blocks))
        secret = self.tickets.give(Ticket(lane, plan_number, sequence_id, blocks, size))
        return push_pb2.PushTicket(
            address=self.address,
            secret=secret,
            first_block=blocks.start,
            num_blocks=len(blocks),
        )

    def _push(self, received: Iterator[bytes], context: Any) -> push_pb2.PushBlocksResponse:
        try:
            self._gate.admit(PUSH_BLOCKS, context)
            silence = _Silence(context)
            answer = self._receive(_decoded(silence.each(received)), silence)
        except Exception as error:
            self._refuse(error, context)
        self._counts.ended("received", "OK")
        return answer

    def _receive(
        self, requests: Iterator[push_pb2.PushBlocksRequest], silence: _Silence
    ) -> push_pb2.PushBlocksResponse:
        first = next(requests, push_pb2.PushBlocksRequest())
        with (
            self._open(first, silence) as ticket,
            closing(_Writes(self._outside, self._counts, ticket)) as writes,
        ):
            for request in requests:
                writes.add(request.chunk)
            return writes.finish()

    @contextmanager
    def _open(self, request: push_pb2.PushBlocksRequest, silence: _Silence) -> Iterator[Ticket]:
        """The ticket that the first request shows, during its push. Without a slot for the push it
        can be used again.
        """
        if not request.HasField("open"):
            raise InvalidRequestError("must come first", field="open")
        opening = request.open
        with self._slots.taken(self.tickets.find(opening.secret).lane.caller):
            ticket = self.tickets.take(opening.secret)
            silence.allow(STALL_S + ticket.num_bytes / MIN_BYTES_PER_S)
            self._check_source(opening)
            yield ticket

    def _check_source(self, opening: push_pb2.OpenPush) -> None:
        if opening.layout_fingerprint != self._outside.layout.fingerprint:
            raise LayoutMismatchError(
                "the blocks come from a pool whose layout differs from this pool's",
                field="open.layout_fingerprint",
            )
        if Shard.from_proto(opening.shard).part != self._outside.shard.part:
            raise LayoutMismatchError(
                "the sender holds other layers or heads: divide both pools in the same way",
                field="open.shard",
            )

    def _refuse(self, error: Exception, context: Any) -> NoReturn:
        if not context.is_active():  # the sender is gone, and its stream says so in its own way
            self._counts.ended("received", "CANCELLED")
            context.abort(grpc.StatusCode.CANCELLED, "the sender is gone")
        if not isinstance(error, KvplaneError):
            _LOGGER.error("unexpected error service=%s error=%s", PEERS.name, frames_of(error))
            error = InternalError("internal error; the receiving server's log has more")
        self._counts.ended("received", error.reason)
        context.abort_with_status(rpc_status.to_status(to_rich_status(error)))
        raise AssertionError("unreachable: aborting raises")


def _decoded(received: Iterator[bytes]) -> Iterator[push_pb2.PushBlocksRequest]:
    for data in received:
        try:
            request = push_pb2.PushBlocksRequest.FromString(data)
        except DecodeError as error:
            raise InvalidRequestError("the bytes are no PushBlocksRequest") from error
        yield request


class _Writes:
    """The chunks of one push: each is checked, and written while the next one comes."""

    def __init__(self, outside: BlocksFromOutside, counts: PushCounts, ticket: Ticket) -> None:
        self._outside = outside
        self._counts = counts
        self._ticket = ticket
        self._num_left = ticket.num_bytes
        self._last: Future[tpb.SignedPayload | None] | None = None

    def add(self, chunk: push_pb2.BlockChunk) -> None:
        """Begin to write a chunk. Raises what is wrong with it, or with the write before."""
        ticket, blocks = self._ticket, self._ticket.blocks
        self._num_left -= len(chunk.data)
        first, last = chunk.first_block, chunk.first_block + chunk.num_blocks
        if not (blocks.start <= first < last <= blocks.stop) or self._num_left < 0:
            raise InvalidRequestError(
                f"the ticket is for entries {blocks.start} to {blocks.stop - 1}, each once",
                field="chunk.first_block",
            )
        chunks.check(chunk)
        if self._last is not None:
            self._last.result()
        entries = BlockRange(
            ticket.sequence_id,
            chunk.first_block,
            chunk.num_blocks,
            chunk.group,
            chunk.first_layer,
            chunk.num_layers,
        )
        self._last = self._outside.write(
            ticket.lane, entries, chunk.data, ticket.plan_number, field="chunk"
        )
        self._counts.moved("received", len(chunk.data))

    def finish(self) -> push_pb2.PushBlocksResponse:
        """The answer to the push. Raises what the last write raises, and InvalidRequestError when
        it ended early.
        """
        receipt = None if self._last is None else self._last.result()
        if self._num_left:
            raise InvalidRequestError(
                f"the push ended {self._num_left} bytes early: nothing of it is found by anybody; "
                "push the blocks again, by another ticket",
                field="chunk",
            )
        return push_pb2.PushBlocksResponse(num_bytes=self._ticket.num_bytes, receipt=receipt)

    def close(self) -> None:
        """Wait until nothing is being written: the push has ended."""
        if self._last is not None:
            wait([self._last])


class _Silence:
    """Cancels a call whose sender keeps it waiting, in all, for longer than is allowed. What the
    receiver itself takes, which writes in the turn of its callers, does not count.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._left_s = OPEN_S

    def allow(self, seconds: float) -> None:
        """Let the sender keep the call waiting for ``seconds`` from now on."""
        self._left_s = seconds

    def each(self, received: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the requests of the call."""
        while True:
            began_s = time.monotonic()
            timer = threading.Timer(self._left_s, self._context.cancel)
            timer.daemon = True
            timer.start()
            try:
                data = next(received, None)
            finally:
                timer.cancel()
            self._left_s -= time.monotonic() - began_s
            if data is None:
                return
            yield data
