"""Keeps this process registered with its control plane until it stops.

    Hello ─► Welcome ─┬─ resumed ──────────────────────────┬─► publications, fences, report requests
                      └─ new ─► install, report, accepted ─┘   heartbeats, finished fences, reports

A control plane that has what this process reported before, such as ahead of time
(``ahead_client``), gets digests first, and a report of what differs.

When the stream ends (the control plane restarts, the network fails), it registers again after a
delay that grows and is random, so that data planes do not all return at once. It does not when a
later process has taken the shard over: a run stays older for as long as it lives.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from data_plane.executor import Executor
from data_plane.server.files.tier import FileTier
from data_plane.server.registration_stream import (
    BLOCKS_PER_REPORT,
    RegistrationStream,
    beating,
    hello_of,
    report_differences,
)
from data_plane.server.worker_thread import WorkerThread
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    PlaneUnavailableError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.transport.tls import TlsOptions, open_channel
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import control_pb2_grpc
from kvplane.wire import protocol

_LOGGER: Final = logging.getLogger(__name__)

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["ControlPlaneService"].full_name
_FIRST_DELAY_S: Final = 0.1
_LAST_DELAY_S: Final = 2.0
# Incarnations are nanoseconds of a clock, unless they are chosen.
_MOST_AHEAD_NS: Final = 24 * 3600 * 10**9
_TAKEN_OVER: Final = (
    "This process ends: its sessions are over, and no engine uses what it holds again. Started "
    "again, it takes the shard once the other one has gone; --pool-id gives it a pool of its own"
)


class RegistrationClient:
    """Registers one executor, and does what the control plane asks."""

    def __init__(
        self,
        executor: Executor,
        worker: WorkerThread,
        control_plane: str,
        *,
        address: str,
        tls: TlsOptions | None = None,
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
        """Register, and again whenever the registration ends. Runs until cancelled. Raises
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
        """With the TLS files as they are by now; those that are wrong change nothing."""
        try:
            channel = self._open()
        except InvalidRequestError as error:
            _LOGGER.error("not renewed control_plane=%s error=%s", self._control_plane, error)
            return
        await self._channel.close(None)
        self._channel = channel

    async def _register(self) -> None:
        """One stream from its Hello to its end. Raises KvplaneError."""
        stub = control_pb2_grpc.ControlPlaneServiceStub(self._channel)
        stream = RegistrationStream(stub.Register())
        try:
            await stream.send(pb.RegisterRequest(hello=hello_of(self._executor, self._address)))
            welcome = (await stream.expect("welcome")).welcome
            protocol.check_chosen(welcome.protocol_version)
            async with beating(stream, welcome):
                await self._begin(stream, welcome)
                self._delay_s = _FIRST_DELAY_S
                _LOGGER.info(
                    "registered incarnation=%d resumed=%s", welcome.incarnation, welcome.resumed
                )
                await self._on_change(True)
                await self._follow(stream)
        finally:
            stream.cancel()

    async def _begin(self, stream: RegistrationStream, welcome: pb.Welcome) -> None:
        """Resume the registration with a control plane that knows this run, or report all blocks
        to one that does not.
        """
        executor = self._executor
        if welcome.resumed:
            if welcome.incarnation != executor.incarnation or not executor.keys.id:
                raise StaleIncarnationError(
                    f"the control plane of incarnation {welcome.incarnation} resumed a "
                    "registration that this data plane does not have: registering again",
                    field="welcome.resumed",
                )
            return
        if welcome.incarnation > time.time_ns() + _MOST_AHEAD_NS:
            # It would never take orders again from a control plane whose clock is right.
            raise StaleIncarnationError(
                f"incarnation {welcome.incarnation} is more than a day ahead of this clock",
                field="welcome.incarnation",
            )
        await self._worker.run(lambda: executor.install(welcome.incarnation, welcome.key))
        if welcome.compares:
            await report_differences(stream, executor, self._worker)
        else:
            await self._report(stream)
            await stream.expect("report_accepted")

    async def _report(self, stream: RegistrationStream) -> None:
        """Send generations and publications of all blocks."""
        for part in await self._worker.run(partial(self._executor.report, BLOCKS_PER_REPORT)):
            await stream.send(pb.RegisterRequest(report=part))

    async def _tell_keys(self, stream: RegistrationStream) -> None:
        """Confirm a step of a rotation of the key."""
        executor = self._executor
        held = pb.KeysHeld(key_id=executor.keys.id, newer_key_id=executor.keys.newer_id)
        _LOGGER.info("keys num_held=%d", 1 + bool(held.newer_key_id))
        await stream.send(pb.RegisterRequest(keys_held=held))

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
                done = pb.FenceDone(session=fence.session)
                await stream.send(pb.RegisterRequest(fence_done=done))
            elif kind == "forget_files" and self._files is not None:
                # Many files take long, and plans must not wait for them.
                task = asyncio.create_task(self._forget(self._files, stream, response.forget_files))
                self._forgetting.add(task)
                task.add_done_callback(self._forgetting.discard)
            elif kind == "key_offer":
                await self._worker.run(partial(executor.keys.add, response.key_offer.key))
                await self._tell_keys(stream)
            elif kind == "key_retirement":
                await self._worker.run(partial(executor.keys.retire, response.key_retirement))
                await self._tell_keys(stream)
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
        self, files: FileTier, stream: RegistrationStream, message: pb.ForgetFiles
    ) -> None:
        """Delete files. What fails is not answered: the control plane asks again when this process
        registers again, and not before.
        """
        try:
            await files.forget(message)
            done = pb.FilesForgotten(forget_id=message.forget_id)
            await stream.send(pb.RegisterRequest(files_forgotten=done))
        except (OSError, KvplaneError) as error:
            _LOGGER.warning("files were not forgotten forget_id=%d: %s", message.forget_id, error)
