"""Reports to control planes that stand by, so that one that leads later knows this process already.

    stands by? ─► Hello (ahead) ─► Welcome ─► digests ─► what differs ─┬─► changed since? ─┐
                                                                      └──── a while ◄─────┘

Each address has a task of its own. It asks for the server's health first, so one that leads, or is
not there, costs a health check now and then.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from dataclasses import replace
from typing import Final

import grpc.aio

from data_plane.executor import Executor
from data_plane.server.registration_stream import (
    RegistrationStream,
    beating,
    hello_of,
    report_differences,
)
from data_plane.server.worker_thread import WorkerThread
from kvplane.errors import KvplaneError
from kvplane.transport.health import check
from kvplane.transport.tls import TlsOptions, open_channel
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import control_pb2_grpc

_LOGGER: Final = logging.getLogger(__name__)
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["ControlPlaneService"].full_name
_DNS: Final = "dns:///"
_HEALTH_TIMEOUT_S: Final = 2.0
# How long to leave one that leads alone, and one that is away.
_LEADS_S: Final = 5.0
_AWAY_S: Final = 1.0
_RESOLVE_S: Final = 5.0
_STANDS_BY: Final = "NOT_SERVING"


class AheadClient:
    """Reports to all of ``control_planes`` that stand by, as often as every ``interval_s``."""

    def __init__(
        self,
        executor: Executor,
        worker: WorkerThread,
        control_planes: str,
        *,
        address: str,
        tls: TlsOptions | None,
        interval_s: float,
    ) -> None:
        """``address``: where clients reach the executor."""
        self._executor = executor
        self._worker = worker
        self._control_planes = control_planes
        self._address = address
        self._tls = tls
        self._interval_s = interval_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled. Names are resolved again and again, as their addresses change."""
        try:
            while True:
                wanted = await _each_of(self._control_planes)
                for target in self._tasks.keys() - wanted:
                    self._tasks.pop(target).cancel()
                for target in wanted - self._tasks.keys():
                    self._tasks[target] = asyncio.create_task(self._report_to(target))
                await asyncio.sleep(_RESOLVE_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _report_to(self, target: str) -> None:
        """Whenever the control plane there stands by."""
        tls = self._tls_of(target)
        while True:
            delay_s = _AWAY_S
            try:
                if await check(target, tls=tls, timeout_s=_HEALTH_TIMEOUT_S) != _STANDS_BY:
                    delay_s = _LEADS_S
                else:
                    async with open_channel(target, tls) as channel:
                        await self._report_on(channel)
            except KvplaneError as error:
                _LOGGER.debug("control_plane=%s no report ahead: %s", target, error.reason)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))

    async def _report_on(self, channel: grpc.aio.Channel) -> None:
        stub = control_pb2_grpc.ControlPlaneServiceStub(channel)
        stream = RegistrationStream(stub.Register())
        try:
            hello = hello_of(self._executor, self._address, is_ahead=True)
            await stream.send(pb.RegisterRequest(hello=hello))
            welcome = (await stream.expect("welcome")).welcome
            async with beating(stream, welcome):
                since = 0
                while True:
                    since = await report_differences(stream, self._executor, self._worker, since)
                    await asyncio.sleep(self._interval_s)
        finally:
            stream.cancel()

    def _tls_of(self, target: str) -> TlsOptions | None:
        """A name's certificate is that of the name, not of an address that it has."""
        if self._tls is None or self._tls.server_name or not self._control_planes.startswith(_DNS):
            return self._tls
        name = self._control_planes.removeprefix(_DNS).rpartition(":")[0]
        return replace(self._tls, server_name=name)


async def _each_of(control_planes: str) -> set[str]:
    """The address of each, "host:port"; of a name that has no address now, none."""
    if not control_planes.startswith(_DNS):
        return set(control_planes.split(","))
    host, _, port = control_planes.removeprefix(_DNS).rpartition(":")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
    except OSError:
        return set()
    return {
        f"[{at[0]}]:{port}" if family == socket.AF_INET6 else f"{at[0]}:{port}"
        for family, *_, at in infos
    }
