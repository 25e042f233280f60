"""The registration streams of data planes: Hello, Welcome, the block report, then what goes to and
fro while both live.

Each shard has at most one live stream: a new one supersedes the old. Nothing here polls: ``flush``
is called after whatever may have given the core something to say, and wakes only the streams that
it concerns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from control_plane.planning.core import ControlPlane
from control_plane.planning.model import Outgoing
from control_plane.server import codec
from kvplane import protocol
from kvplane.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    KvplaneError,
    StaleEpochError,
)
from kvplane.serving.streams import stopping_error
from kvplane.v1 import control_pb2 as pb

_LOGGER: Final = logging.getLogger(__name__)
_MISSED_HEARTBEATS: Final = 3


class Registrar:
    """All registration streams of this control plane."""

    def __init__(self, core: ControlPlane, *, heartbeat_s: float) -> None:
        self._core = core
        self._heartbeat_s = heartbeat_s
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._stopping = False

    async def serve(
        self, requests: AsyncIterator[pb.RegisterRequest]
    ) -> AsyncIterator[pb.RegisterResponse]:
        """Answer one stream until either side ends it.

        Raises what the core raises of the Hello or the report; DeadlineExceededError when
        heartbeats stop; StaleEpochError when another process takes the shard over, CancelledError
        when the same one does by a new stream.
        """
        stream = await self._open(requests)
        reader = asyncio.create_task(self._read(stream, requests))
        reader.add_done_callback(lambda _: stream.changed.set())
        try:
            while stream.failure is None:
                while stream.outbox:
                    yield _encoded(stream.outbox.popleft())
                if reader.done():
                    await reader
                    return
                await stream.changed.wait()
                stream.changed.clear()
            raise stream.failure
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, KvplaneError):
                await reader
            self._close(stream)

    def flush(self) -> None:
        """Hand what the core has to say to the streams that it is for."""
        for stream in self._streams.values():
            if not stream.ready:
                continue
            outgoing = self._core.take_outgoing(stream.pool_id, stream.shard_index)
            stream.outbox.extend(outgoing)
            if outgoing:
                stream.changed.set()

    def stop(self) -> None:
        """End all streams, and refuse new ones; the data planes will look for another control
        plane.
        """
        self._stopping = True
        for stream in self._streams.values():
            stream.fail(stopping_error("control plane"))

    async def _open(self, requests: AsyncIterator[pb.RegisterRequest]) -> _Stream:
        if self._stopping:
            raise stopping_error("control plane")
        first = await self._next(requests)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequestError("must come first", field="hello")
        version = protocol.negotiate(first.hello.protocol, field="hello.protocol")
        hello = codec.hello_from_proto(first.hello)
        welcome = self._core.register(hello)
        stream = _Stream(hello.pool_id, hello.shard.index, hello.epoch, ready=welcome.resumed)
        self._supersede(stream)
        answer = codec.welcome_to_proto(welcome, version, self._heartbeat_s)
        stream.outbox.append(answer)
        self.flush()
        _LOGGER.info("registered %s address=%s resumed=%s", stream, hello.address, welcome.resumed)
        return stream

    def _supersede(self, stream: _Stream) -> None:
        old = self._streams.get(stream.key)
        self._streams[stream.key] = stream
        if old is None:
            return
        if old.epoch != stream.epoch:
            old.fail(StaleEpochError("another process has registered as this shard"))
        else:
            old.fail(CancelledError("superseded by a newer registration stream"))

    async def _read(self, stream: _Stream, requests: AsyncIterator[pb.RegisterRequest]) -> None:
        while (request := await self._next(requests)) is not None and stream.failure is None:
            kind = request.WhichOneof("message")
            if kind == "report":
                self._report(stream, request.report)
            elif kind == "fence_done":
                session_id = request.fence_done.session_id
                self._core.fence_done(*stream.key, stream.epoch, session_id)
                self.flush()
            elif kind != "heartbeat":
                raise InvalidRequestError(
                    f"{kind or 'an empty message'} may not come here", field=kind or "message"
                )

    def _report(self, stream: _Stream, report: pb.BlockReport) -> None:
        blocks = codec.reported_blocks_from_proto(report)
        self._core.report(
            *stream.key,
            stream.epoch,
            blocks,
            last=report.last,
            max_session_id=report.max_session_id,
        )
        if report.last:
            stream.ready = True
            stream.outbox.append(pb.RegisterResponse(report_accepted=pb.ReportAccepted()))
            stream.changed.set()
            self.flush()
            _LOGGER.info("reported %s", stream)

    async def _next(self, requests: AsyncIterator[pb.RegisterRequest]) -> pb.RegisterRequest | None:
        silence_s = self._heartbeat_s * _MISSED_HEARTBEATS
        try:
            async with asyncio.timeout(silence_s):
                return await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceededError(f"no heartbeat for {silence_s:g} s") from None

    def _close(self, stream: _Stream) -> None:
        if self._streams.get(stream.key) is not stream:
            return
        del self._streams[stream.key]
        self._core.disconnect(*stream.key, stream.epoch)
        _LOGGER.info("disconnected %s", stream)


class _Stream:
    """One live stream: who is at its other end, and what it is about to be told."""

    def __init__(self, pool_id: str, shard_index: int, epoch: int, *, ready: bool) -> None:
        self.pool_id = pool_id
        self.shard_index = shard_index
        self.epoch = epoch
        self.ready = ready  # resumed, or reported to the end
        self.outbox: deque[pb.RegisterResponse | Outgoing] = deque()
        self.changed = asyncio.Event()
        self.failure: KvplaneError | None = None

    @property
    def key(self) -> tuple[str, int]:
        return (self.pool_id, self.shard_index)

    def __str__(self) -> str:
        return f"pool={self.pool_id!r} shard={self.shard_index} epoch={self.epoch}"

    def fail(self, error: KvplaneError) -> None:
        self.failure = error
        self.changed.set()


def _encoded(message: pb.RegisterResponse | Outgoing) -> pb.RegisterResponse:
    """Encode what the core says when its turn comes: the step that it came of is answered first."""
    if isinstance(message, pb.RegisterResponse):
        return message
    return codec.outgoing_to_proto(message)
