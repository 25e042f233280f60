"""Keeps this process registered with its control plane until the process stops.

    Hello ─► Welcome ─┬─ resumed ──────────────────────────┬─► publications, fences, report requests
                      └─ new ─► install, report, accepted ─┘   heartbeats, finished fences, reports

When the stream ends (the control plane restarts, the network fails), it registers again after a
growing, random delay, so that data planes do not all return at once. It does not register again
when a later process has taken over the shard, because its epoch stays the lower one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from data_plane.execution.executor import Executor
from data_plane.server.file_tier import FileTier
from data_plane.server.worker_thread import WorkerThread
from data_plane.tier_keys import tier_key_of
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    PlaneUnavailableError,
    ProtocolMismatchError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.release import release
from kvplane.sync.short_thread import start_short_thread
from kvplane.transport.connection import BROKEN_CALL
from kvplane.transport.tls import Tls, open_channel, resolved
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.plane.v1 import registration_pb2_grpc
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION, OLDEST_PAYLOAD_VERSION
from kvplane.wire.v1 import types_pb2 as tpb

_LOGGER: Final = logging.getLogger(__name__)

_SERVICE: Final = "kvplane.plane.v1.RegistrationService"
BLOCKS_PER_REPORT: Final = 2048
_ANSWER_TIMEOUT_S: Final = 30.0
_RESOLVE_S: Final = 2.0
_HEARTBEAT_RANGE_S: Final = (0.01, 3600.0)
_FIRST_DELAY_S: Final = 0.1
_LAST_DELAY_S: Final = 2.0
# Incarnations are nanoseconds of a clock, unless they are chosen.
_MOST_AHEAD_NS: Final = 24 * 3600 * 10**9
_TAKEN_OVER: Final = (
    "This process ends: its sessions have ended, and no engine will use its blocks again. Started "
    "again, it takes the shard once the other one has gone; --pool-id gives it a pool of its own"
)


class RegistrationClient:
    """Keeps one executor registered, and carries out the control plane's requests."""

    def __init__(
        self,
        executor: Executor,
        worker: WorkerThread,
        control_plane: str,
        *,
        address: str,
        tls: Tls | None = None,
        on_change: Callable[[bool], Awaitable[None]],
        files: FileTier | None = None,
    ) -> None:
        """``address``: where clients reach the executor. ``on_change`` is called with True when
        registered and with False when a registration or an attempt has ended. ``files``: None
        where blocks are not kept in files.
        """
        self._executor = executor
        self._worker = worker
        self._control_plane = control_plane
        self._open = partial(open_channel, control_plane, tls, health_of=_SERVICE)
        self._channel = self._open()
        self._address = address
        self._on_change = on_change
        self._files = files
        self._forgetting: set[asyncio.Task[None]] = set()
        self._delay_s = _FIRST_DELAY_S

    async def run(self) -> None:
        """Register, and register again whenever the registration ends, until cancelled. Raises
        StaleEpochError when a later process holds the shard.
        """
        try:
            while True:
                try:
                    await self._register()
                except KvplaneError as error:
                    if isinstance(error, StaleEpochError) and error.field == "hello.epoch":
                        _LOGGER.error("taken over reason=%s %s", error.reason, error)
                        raise StaleEpochError(f"{error.message}. {_TAKEN_OVER}") from error
                    _LOGGER.warning(
                        "registration ended reason=%s control_plane=%s %s",
                        error.reason,
                        self._control_plane,
                        error,
                    )
                finally:
                    await self._on_change(False)
                await asyncio.sleep(self._delay_s * random.uniform(0.5, 1.5))
                self._delay_s = min(2 * self._delay_s, _LAST_DELAY_S)
                await self._reopen()
        finally:
            await self._channel.close(None)

    async def _reopen(self) -> None:
        """Open a channel with the present addresses and TLS files. Keep the old channel if they are
        invalid, or if the resolver does not answer in time.
        """
        found, _ = start_short_thread(partial(resolved, self._control_plane))
        try:
            async with asyncio.timeout(_RESOLVE_S):
                numbers = await asyncio.wrap_future(found)
            channel = self._open(numbers=numbers)
        except (InvalidRequestError, TimeoutError) as error:
            _LOGGER.error("not renewed control_plane=%s error=%r", self._control_plane, error)
            return
        await self._channel.close(None)
        self._channel = channel

    async def _register(self) -> None:
        """Run one registration stream from its Hello to its end. Raises KvplaneError."""
        stub = registration_pb2_grpc.RegistrationServiceStub(self._channel)
        stream = RegistrationStream(stub.Register())
        try:
            await stream.send(rpb.RegisterRequest(hello=_hello_of(self._executor, self._address)))
            welcome = (await stream.expect("welcome")).welcome
            _check_payload_version(welcome)
            async with _beating(stream, welcome):
                await self._begin(stream, welcome)
                self._delay_s = _FIRST_DELAY_S
                text = "registered incarnation=%d version=%r resumed=%s"
                _LOGGER.info(text, welcome.incarnation, welcome.version, welcome.resumed)
                await self._on_change(True)
                await self._follow(stream)
        finally:
            stream.cancel()

    async def _begin(self, stream: RegistrationStream, welcome: rpb.Welcome) -> None:
        """Resume the registration with a control plane that knows this run, or report all blocks
        to one that does not.
        """
        executor = self._executor
        if welcome.resumed:
            if welcome.incarnation != executor.incarnation or not executor.key_id:
                raise StaleIncarnationError(
                    f"the control plane of incarnation {welcome.incarnation} resumed a "
                    "registration that this data plane does not have: registering again",
                    field="welcome.resumed",
                )
            return
        if welcome.incarnation > time.time_ns() + _MOST_AHEAD_NS:
            # Otherwise it would refuse every control plane whose clock is right from now on.
            raise StaleIncarnationError(
                f"incarnation {welcome.incarnation} is more than a day ahead of this clock",
                field="welcome.incarnation",
            )
        await self._worker.run(lambda: executor.install(welcome.incarnation, welcome.key))
        await self._report(stream)
        await stream.expect("report_accepted")

    async def _report(self, stream: RegistrationStream) -> None:
        """Send the block report: generations and publications of all blocks."""
        for part in await self._worker.run(partial(self._executor.report, BLOCKS_PER_REPORT)):
            await stream.send(rpb.RegisterRequest(report=part))

    async def _follow(self, stream: RegistrationStream) -> None:
        """Handle the control plane's messages until the stream ends."""
        executor = self._executor
        num_reports = 0
        while True:
            response = await stream.receive()
            kind = response.WhichOneof("message")
            if kind == "publish":
                publications = response.publish.publications
                await self._worker.run(partial(executor.publish, publications))
            elif kind == "withdraw":
                await self._worker.run(partial(executor.withdraw, response.withdraw))
            elif kind == "fence":
                fence = response.fence
                await self._worker.run(partial(executor.fence, fence.session, fence.ordinal))
                done = rpb.FenceDone(session=fence.session)
                await stream.send(rpb.RegisterRequest(fence_done=done))
            elif kind == "forget_files" and self._files is not None:
                # Many files take long, and plans must not wait for them.
                task = asyncio.create_task(self._forget(self._files, stream, response.forget_files))
                self._forgetting.add(task)
                task.add_done_callback(self._forgetting.discard)
            elif kind == "report_request":
                num_reports += 1
                await self._report(stream)
            elif kind == "report_accepted" and num_reports > 0:
                num_reports -= 1
            else:
                raise PlaneUnavailableError(
                    f"the control plane sent an unexpected message, {kind}: registering again"
                )

    async def _forget(
        self, files: FileTier, stream: RegistrationStream, message: rpb.ForgetFiles
    ) -> None:
        """Delete files of forgotten prefixes. A failure is not answered: the control plane repeats
        the request when this process registers again, and not before.
        """
        try:
            await files.forget(message)
            done = rpb.FilesForgotten(forget_id=message.forget_id)
            await stream.send(rpb.RegisterRequest(files_forgotten=done))
        except (OSError, KvplaneError) as error:
            _LOGGER.warning("files were not forgotten forget_id=%d: %s", message.forget_id, error)


def _hello_of(executor: Executor, address: str) -> rpb.Hello:
    """Return the Hello message of an executor. ``address``: where clients reach the executor."""
    return rpb.Hello(
        pool_id=executor.pool_id,
        shard=executor.shard.to_proto(),
        epoch=executor.epoch,
        layout=executor.layout.to_proto(),
        num_device_blocks=executor.pools.device_tier.shape[0],
        num_host_blocks=executor.pools.host_tier.shape[0],
        groups=_groups(executor),
        address=address,
        incarnation=executor.incarnation,
        key_id=executor.key_id,
        version=release(),
        oldest_payload_version=OLDEST_PAYLOAD_VERSION,
        newest_payload_version=NEWEST_PAYLOAD_VERSION,
        has_file_tier=executor.blocks.is_watched,
    )


def _check_payload_version(welcome: rpb.Welcome) -> None:
    """Raise ProtocolMismatchError unless the control plane chose an offered version."""
    oldest, newest = OLDEST_PAYLOAD_VERSION, NEWEST_PAYLOAD_VERSION
    if not oldest <= welcome.payload_version <= newest:
        raise ProtocolMismatchError(
            f"the control plane {welcome.version!r} chose payload version "
            f"{welcome.payload_version}, and this data plane {release()!r} knows {oldest} to "
            f"{newest}: update the control plane",
            field="welcome.payload_version",
        )


class RegistrationStream:
    """A registration stream that raises KvplaneErrors and serializes its writes."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._turn = asyncio.Lock()

    async def send(self, request: rpb.RegisterRequest) -> None:
        try:
            async with self._turn:
                await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise PlaneUnavailableError("the stream has ended") from error

    async def receive(self) -> rpb.RegisterResponse:
        try:
            response: Any = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from error
        if response is grpc.aio.EOF:
            raise PlaneUnavailableError("the control plane ended the stream")
        message: rpb.RegisterResponse = response
        return message

    async def expect(self, kind: str) -> rpb.RegisterResponse:
        """Return the next message, which has to be a ``kind``, and arrive in _ANSWER_TIMEOUT_S."""
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                response = await self.receive()
        except TimeoutError:
            raise PlaneUnavailableError(
                f"the control plane sent no {kind} within {_ANSWER_TIMEOUT_S:g} s"
            ) from None
        has = response.WhichOneof("message")
        if has != kind:
            raise PlaneUnavailableError(f"the control plane sent {has} instead of {kind}")
        return response

    def cancel(self) -> None:
        self._call.cancel()


def _typed(error: grpc.aio.AioRpcError) -> KvplaneError:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolMismatchError(
            f"the control plane is not served there: is --control-plane right? {error.details()}"
        )
    if error.details() == BROKEN_CALL:  # it ended while this side wrote
        return PlaneUnavailableError("the stream broke")
    return from_rpc_error(error)


@asynccontextmanager
async def _beating(stream: RegistrationStream, welcome: rpb.Welcome) -> AsyncIterator[None]:
    """Send heartbeats inside the context. A failed send is ignored: reading fails too."""
    shortest_s, longest_s = _HEARTBEAT_RANGE_S
    interval_s = min(max(welcome.heartbeat_interval.ToNanoseconds() / 1e9, shortest_s), longest_s)

    async def beat() -> None:
        while True:
            await asyncio.sleep(interval_s)
            await stream.send(rpb.RegisterRequest(heartbeat=rpb.Heartbeat()))

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _groups(executor: Executor) -> list[rpb.GroupBlocks]:
    """Return the numbers of blocks of each layer group; none if there is one group."""
    num_groups, num_blocks = len(executor.layout.groups), executor.pools.num_blocks
    if num_groups == 1:
        return []
    return [
        rpb.GroupBlocks(
            num_device_blocks=num_blocks[tier_key_of(group, tpb.TIER_DEVICE)],
            num_host_blocks=num_blocks[tier_key_of(group, tpb.TIER_HOST)],
        )
        for group in range(num_groups)
    ]
