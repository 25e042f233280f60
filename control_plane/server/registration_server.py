"""The registration streams of data planes: Hello, Welcome, the block report, then messages both
ways while both processes run.

Each shard has at most one live stream. A new one supersedes and ends it if the new one's process
proves by the pool's key that it is the same, or if nothing was heard on the old one for longer than
a heartbeat. Nothing here polls: ``flush`` is called after everything that may have made the core
queue messages, and wakes only the streams that have some.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from control_plane.core import ControlPlane
from control_plane.limits import MAX_WAITING_MESSAGES
from kvplane.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    KvplaneError,
    NotPermittedError,
    PoolNotReadyError,
    ProtocolMismatchError,
    QuotaExceededError,
    StaleEpochError,
)
from kvplane.plane.v1 import registration_pb2 as contract
from kvplane.serving.callers.access import Caller
from kvplane.serving.callers.identity import caller
from kvplane.serving.streams import stopping_error
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.plane.v1 import registration_pb2_grpc

REGISTRATION: Final = contract.DESCRIPTOR.services_by_name["RegistrationService"]
_LOGGER: Final = logging.getLogger(__name__)
_MISSED_HEARTBEATS: Final = 3
_ALIVE_HEARTBEATS: Final = 1.5
# How long publications wait, so that those of many steps go together.
_ANNOUNCE_DELAY_S: Final = 0.005
_CUT_AFTER_S: Final = 2.0

_Context = grpc.aio.ServicerContext[Any, Any]


class Registrar(registration_pb2_grpc.RegistrationServiceServicer):
    """The gRPC service that data planes register with: it serves all their streams."""

    def __init__(
        self,
        core: ControlPlane,
        *,
        heartbeat_s: float,
        max_waiting_messages: int = MAX_WAITING_MESSAGES,
    ) -> None:
        """``max_waiting_messages``: for one stream, beyond those that it begins with."""
        self._core = core
        self._max_waiting = max_waiting_messages
        self._heartbeat_s = heartbeat_s
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._stopping = False
        self._is_announcing = False
        self.has_work = asyncio.Event()
        """Is set when the core has long work to do."""

    def Register(
        self, request_iterator: AsyncIterator[rpb.RegisterRequest], context: _Context
    ) -> AsyncIterator[rpb.RegisterResponse]:
        return self.serve(request_iterator, caller())

    async def serve(
        self, requests: AsyncIterator[rpb.RegisterRequest], caller: Caller
    ) -> AsyncIterator[rpb.RegisterResponse]:
        """Serve one registration stream until either side ends it.

        Raises what the core raises for the Hello or the report; NotPermittedError when the caller
        may not register for the pool; DeadlineExceededError when heartbeats stop; StaleEpochError
        when another process takes the shard over, CancelledError when the same one opens a new
        stream.
        """
        hello = await self._hello(requests, caller)
        stream = self._open(hello)
        reader = asyncio.create_task(self._read(stream, requests))
        reader.add_done_callback(lambda _: stream.changed.set())
        try:
            while stream.failure is None:
                if stream.outbox:
                    yield stream.outbox.popleft()
                elif reader.done():
                    await reader
                    return
                elif (missed := self._core.take_missed(*stream.key)) is not None:
                    stream.outbox.extend(missed)
                    await asyncio.sleep(0)  # others must not wait for all of it
                else:
                    await stream.changed.wait()
                    stream.changed.clear()
            raise stream.failure
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, KvplaneError):
                await reader
            if stream.cut is not None:
                stream.cut.cancel()
            self._close(stream)

    def heartbeat_ages(self) -> dict[tuple[str, int], float]:
        """Return the seconds since each registered shard's last message, by pool and index."""
        now_s = time.monotonic()
        return {key: now_s - stream.heard_s for key, stream in self._streams.items()}

    def flush(self) -> None:
        """Move the messages that the core has queued to the data planes' streams."""
        for key in self._core.take_notified():
            stream = self._streams.get(key)
            if stream is not None and (outgoing := self._core.take_outgoing(*key)):
                self._send(stream, outgoing)
        if self._core.has_work():
            self.has_work.set()
        if self._core.has_announcements() and not self._is_announcing:
            self._is_announcing = True
            asyncio.get_running_loop().call_later(_ANNOUNCE_DELAY_S, self._announce)

    def _announce(self) -> None:
        self._is_announcing = False
        self._core.announce()
        self.flush()

    def _send(self, stream: _Stream, messages: list[rpb.RegisterResponse]) -> None:
        """Queue messages for a stream. If its data plane does not read, end the stream instead: the
        data plane gets what it missed when it comes back.
        """
        stream.outbox.extend(messages)
        stream.changed.set()
        if stream.most_waiting is None:
            stream.most_waiting = len(stream.outbox) + self._max_waiting
        elif len(stream.outbox) > stream.most_waiting:
            _LOGGER.warning("cut %s: waiting=%d", stream, len(stream.outbox))
            stream.fail(
                QuotaExceededError(f"{len(stream.outbox)} messages wait to be read: register again")
            )
            self._close(stream)

    def stop(self) -> None:
        """End all streams and refuse new ones; the data planes try to register again."""
        self._stopping = True
        for stream in self._streams.values():
            stream.fail(stopping_error("control plane"))

    async def _hello(
        self, requests: AsyncIterator[rpb.RegisterRequest], caller: Caller
    ) -> rpb.Hello:
        if self._stopping:
            raise stopping_error("control plane")
        first = await self._next(requests)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequestError("must come first", field="hello")
        hello = first.hello
        if not caller.may_register(hello.pool_id):
            raise NotPermittedError(
                "the access list does not name this pool for the caller", field="hello.pool_id"
            )
        if self._stopping:
            raise stopping_error("control plane")
        return hello

    def _open(self, hello: rpb.Hello) -> _Stream:
        self._require_free(hello)
        try:
            welcome = self._core.register(hello)
        except ProtocolMismatchError as error:
            # The data plane tries for ever, and its pool is not ready: operators look here too.
            _LOGGER.warning("not registered pool=%r %s", hello.pool_id, error.message)
            raise
        welcome.heartbeat_interval.FromNanoseconds(int(self._heartbeat_s * 1e9))
        stream = _Stream(hello)
        self._supersede(stream)
        stream.outbox.append(rpb.RegisterResponse(welcome=welcome))
        self.flush()
        text = "registered %s address=%s version=%r resumed=%s"
        _LOGGER.info(text, stream, hello.address, hello.version, welcome.resumed)
        return stream

    def _require_free(self, hello: rpb.Hello) -> None:
        """Raise PoolNotReadyError while another process holds the shard and still sends messages.
        Epochs are public, so a higher one does not prove that this process succeeds that one.
        """
        old = self._streams.get((hello.pool_id, hello.shard.index))
        if old is None or hello.epoch < old.epoch or self._core.holds_key(hello):
            return  # the core decides whether these may register
        if time.monotonic() - old.heard_s < _ALIVE_HEARTBEATS * self._heartbeat_s:
            raise PoolNotReadyError(
                f"a process of epoch {old.epoch} holds the shard and is connected: another one can "
                "register when it is gone",
                field="hello.epoch",
                retry_delay_s=self._heartbeat_s,
            )

    def _supersede(self, stream: _Stream) -> None:
        old = self._streams.get(stream.key)
        self._streams[stream.key] = stream
        if old is None:
            return
        if old.epoch != stream.epoch:
            old.fail(StaleEpochError("a later process has registered as this shard"))
        else:
            old.fail(CancelledError("superseded by a newer registration stream"))

    async def _read(self, stream: _Stream, requests: AsyncIterator[rpb.RegisterRequest]) -> None:
        while (request := await self._next(requests)) is not None and stream.failure is None:
            stream.heard_s = time.monotonic()
            kind = request.WhichOneof("message")
            if kind == "report":
                self._report(stream, request.report)
            elif kind == "fence_done":
                self._core.fence_done(*stream.key, stream.epoch, request.fence_done)
                self.flush()
            elif kind == "files_forgotten":
                self._core.files_forgotten(*stream.key, stream.epoch, request.files_forgotten)
            elif kind != "heartbeat":
                raise InvalidRequestError(
                    "must be a report, fence_done, files_forgotten or a heartbeat after the hello",
                    field=kind or "message",
                )

    def _report(self, stream: _Stream, report: rpb.BlockReport) -> None:
        self._core.report(*stream.key, stream.epoch, report)
        if report.last:
            stream.outbox.append(rpb.RegisterResponse(report_accepted=rpb.ReportAccepted()))
            stream.changed.set()
            self.flush()
            _LOGGER.info("reported %s", stream)

    async def _next(
        self, requests: AsyncIterator[rpb.RegisterRequest]
    ) -> rpb.RegisterRequest | None:
        silence_s = self._heartbeat_s * _MISSED_HEARTBEATS
        loop = asyncio.get_running_loop()
        read = asyncio.ensure_future(anext(requests, None))
        try:
            while True:
                due_s = loop.time() + silence_s
                await asyncio.wait({read}, timeout=silence_s)
                if read.done():
                    return read.result()
                # If this process was held up, unread messages may wait.
                if loop.time() - due_s < self._heartbeat_s:
                    raise DeadlineExceededError(f"no heartbeat for {silence_s:g} s")
        finally:
            read.cancel()

    def _close(self, stream: _Stream) -> None:
        if self._streams.get(stream.key) is not stream:
            return
        del self._streams[stream.key]
        self._core.disconnect(*stream.key, stream.epoch)
        _LOGGER.info("disconnected %s", stream)


class _Stream:
    """One live stream: its shard and epoch, and the messages that wait to be sent."""

    def __init__(self, hello: rpb.Hello) -> None:
        self.key = (hello.pool_id, hello.shard.index)
        self.epoch = hello.epoch
        self.outbox: deque[rpb.RegisterResponse] = deque()
        self.changed = asyncio.Event()
        self.most_waiting: int | None = None  # set once the first messages are in the outbox
        self.failure: KvplaneError | None = None
        self.heard_s = time.monotonic()
        self.cut: asyncio.TimerHandle | None = None
        self._task = asyncio.current_task()  # which carries the stream

    def __str__(self) -> str:
        pool_id, shard_index = self.key
        return f"pool={pool_id!r} shard={shard_index} epoch={self.epoch}"

    def fail(self, error: KvplaneError) -> None:
        self.failure = error
        self.outbox.clear()
        self.changed.set()
        if self.cut is None and self._task is not None:
            # Sending a message to a peer that does not read may block for ever.
            self.cut = asyncio.get_running_loop().call_later(_CUT_AFTER_S, self._task.cancel)
