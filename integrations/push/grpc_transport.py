"""Blocks go to other data planes in messages of gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from data_plane.blocks_from_outside import BlockRange
from kvplane.errors import KvplaneError, PlaneUnavailableError
from kvplane.transport.renewed import Renewed
from kvplane.transport.tls import Tls, credentials_of
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.protocol import CHANNEL_OPTIONS

from . import chunks, push_pb2
from .stubs import method

Chunks = Iterator[tuple[BlockRange, memoryview]]


class PushChannels:
    """Connections to receivers, one for each push. ``tls``: None for in the clear."""

    def __init__(self, tls: Tls | None) -> None:
        self._credentials = None if tls is None else Renewed(lambda: credentials_of(tls), tls.files)
        self._options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS]
        if tls is not None and tls.server_name:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))

    def open(self, address: str) -> grpc.Channel:
        """To be closed by the caller."""
        if self._credentials is None:
            return grpc.insecure_channel(address, self._options)
        return grpc.secure_channel(address, self._credentials.get(), self._options)


class GrpcTransport:
    """Begins pushes."""

    def __init__(self, channels: PushChannels) -> None:
        self._channels = channels

    def push(self, ticket: push_pb2.PushTicket, opening: push_pb2.OpenPush, blocks: Chunks) -> Push:
        """Send ``blocks`` to who gave the ticket, as far as it takes them. They are taken from
        another thread, and must not raise. Raises KvplaneError.
        """
        channel = self._channels.open(ticket.address)
        requests = _requests(opening, blocks)
        call = method(channel, "PushBlocks").future(requests)
        return Push(call, channel)


class Push:
    """A push under way."""

    def __init__(self, call: Any, channel: grpc.Channel) -> None:
        self._call = call
        self.cancel = call.cancel
        self.add_done_callback = call.add_done_callback
        self.close = channel.close

    def result(self) -> push_pb2.PushBlocksResponse:
        """The answer of a push that has ended. Raises KvplaneError."""
        try:
            answer: push_pb2.PushBlocksResponse = self._call.result(timeout=0)
        except grpc.RpcError as error:
            raise _of_receiver(from_rpc_error(self._call)) from error
        except (grpc.FutureCancelledError, grpc.FutureTimeoutError) as error:
            raise PlaneUnavailableError("the push was cancelled") from error
        return answer


def _of_receiver(error: KvplaneError) -> KvplaneError:
    """The receiver's error, as the sender's."""
    return type(error)(
        f"the receiving data plane refused: {error.message}",
        field=error.field and f"ticket.{error.field}",
        retry_delay_s=error.retry_delay_s,
    )


def _requests(opening: push_pb2.OpenPush, blocks: Chunks) -> Iterator[push_pb2.PushBlocksRequest]:
    yield push_pb2.PushBlocksRequest(open=opening)
    for place, data in blocks:
        yield push_pb2.PushBlocksRequest(chunk=chunks.chunk_of(place, data))
