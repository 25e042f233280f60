"""The whole control plane: core, servicer, gRPC server, metrics, and the task that ends leases; and
the program, which runs it until a signal.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from control_plane.core import ControlPlane
from control_plane.server.config import PROGRAM, ControlPlaneSettings
from control_plane.server.election.elector import Elector
from control_plane.server.election.file_elector import FileElector
from control_plane.server.election.kubernetes_elector import KubernetesApi, KubernetesElector
from control_plane.server.metrics import ControlPlaneMetrics
from control_plane.server.page.page_server import PageServer
from control_plane.server.registration_server import REGISTRATION, Registrar
from control_plane.server.service import (
    POOLS,
    PREFIX,
    SESSIONS,
    PoolService,
    PrefixService,
    SessionService,
)
from kvplane import tracing
from kvplane.errors import InvalidRequestError, PlaneUnavailableError
from kvplane.release import release
from kvplane.serving import event_loop
from kvplane.serving.observability import logs
from kvplane.serving.observability.logs import frames_of
from kvplane.serving.plane_server import PlaneServer, Service
from kvplane.serving.server import wait_for_signal
from kvplane.serving.server_service import SERVER, ServerService
from kvplane.serving.settings import EXIT_BAD_SETTINGS, log_settings, parse
from kvplane.wire.plane.v1.registration_pb2_grpc import add_RegistrationServiceServicer_to_server
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1.pool_pb2_grpc import (
    add_PoolServiceServicer_to_server,
    add_ServerServiceServicer_to_server,
)
from kvplane.wire.v1.prefix_pb2_grpc import add_PrefixServiceServicer_to_server
from kvplane.wire.v1.session_pb2_grpc import add_SessionServiceServicer_to_server

_LOGGER: Final = logging.getLogger(__name__)
_LONGEST_TICK_S: Final = 0.25
_OF_MAX_OPERATIONS: Final = (
    "StepRequest.operations",
    "StepRequest.receipts",
    "AbortPlansRequest.receipts",
)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the control plane's program with the settings of ``argv`` and ``environ``; returns the
    exit code, or exits for bad settings.
    """
    config = parse(ControlPlaneSettings, PROGRAM, argv, environ, "kvplane control")
    logs.setup(config.log_level, config.log_format)
    log_settings(config, logging.getLogger(PROGRAM))
    try:
        tracing.setup("kvplane-control-plane", environ)
        event_loop.run(_serve(config))
    except InvalidRequestError as error:  # an election or traces that are not available here
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return EXIT_BAD_SETTINGS
    except (OSError, PlaneUnavailableError) as error:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 1
    return 0


async def _serve(config: ControlPlaneSettings) -> None:
    server = await ControlPlaneServer.start(config)
    _reduce_garbage_collection()
    await server.run_until_signal()


def _reduce_garbage_collection() -> None:
    """Make full garbage collections rare: each visits all index entries while a step waits."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 1_000)


class ControlPlaneServer(PlaneServer):
    """A control plane with its gRPC server, metrics and status page. Made by ``start``, ended by
    ``run_until_signal`` or ``stop``.

    With an election it stands by until it leads: its health is NOT_SERVING, and calls are refused.
    """

    leading: asyncio.Task[None] | None = None
    """The task of the election, if there is one. Ends with PlaneUnavailableError."""
    ticks: asyncio.Task[None]
    work: asyncio.Task[None]

    def __init__(self, config: ControlPlaneSettings) -> None:
        """Bind the addresses, but accept no calls yet; see ``start``."""
        incarnation = config.incarnation or time.time_ns()
        self.core = core = ControlPlane(
            incarnation=incarnation,
            config=config.core,
            clock=time.monotonic,
        )
        self.metrics = ControlPlaneMetrics(incarnation)
        self._registrar = registrar = Registrar(core, heartbeat_s=config.heartbeat_s)
        self.metrics.read_pools_on(
            asyncio.get_running_loop(),
            lambda: ([core.observe_pool(i) for i in core.pool_ids()], registrar.heartbeat_ages()),
        )
        self._servicer = servicer = SessionService(core, registrar, self.metrics)
        about = ServerService(self._describe)
        of_prefixes = PrefixService(core, servicer.flush)
        max_counts = dict.fromkeys(_OF_MAX_OPERATIONS, config.core.max_operations)
        super().__init__(
            config,
            [
                Service(SERVER, partial(add_ServerServiceServicer_to_server, about)),
                Service(POOLS, partial(add_PoolServiceServicer_to_server, PoolService(core))),
                Service(
                    SESSIONS,
                    partial(add_SessionServiceServicer_to_server, servicer),
                    servicer.stop,
                ),
                Service(
                    REGISTRATION,
                    partial(add_RegistrationServiceServicer_to_server, registrar),
                    registrar.stop,
                ),
                Service(
                    PREFIX,
                    partial(add_PrefixServiceServicer_to_server, of_prefixes),
                    of_prefixes.stop,
                ),
            ],
            self.metrics,
            max_message_bytes=config.max_message_bytes,
            max_counts=max_counts,
            also_bind=config.plane_bind,
        )
        shown = {"version": release(), "incarnation": str(incarnation)}
        self.metrics.tenant_label = self._access.metrics_label
        hosts = filter(None, config.page_hosts.split(","))
        self._page = PageServer(core.view_pools, self._access, shown, hosts)

    @classmethod
    async def start(cls, config: ControlPlaneSettings) -> ControlPlaneServer:
        """Start a control plane with these settings on the running event loop. Raises OSError when
        an address cannot be bound or the port file not be written.
        """
        self = cls(config)
        if config.page_port >= 0:
            await self._page.start(self._server.host, config.page_port, config.server_tls)
            _LOGGER.info("page address=%s:%d", self._server.host, self._page.port)
        elector = None
        if config.election:
            elector = elector_of(
                config.election,
                config.advertise or self.address,
                ttl_s=config.election_ttl_s,
            )
            self._gate.stands_by = True
        await self._serve(serving=elector is None)
        self.ticks = asyncio.create_task(_tick(self.core, self._servicer))
        self.work = asyncio.create_task(self._servicer.work())
        _LOGGER.info("metrics port=%s incarnation=%d", self.metrics_port, self.core.incarnation)
        if elector is not None:
            self.leading = asyncio.create_task(self._lead(elector))
        self.metrics.leads = elector is None
        await self._announce()
        return self

    @property
    def page_address(self) -> str:
        """Address of the status page, "host:port"; the port is 0 when it is off."""
        return f"{self._server.host}:{self._page.port}"

    async def run_until_signal(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop. Raises PlaneUnavailableError when another may
        lead, and the error of an election that failed.
        """
        ends: list[asyncio.Task[None]] = [asyncio.create_task(wait_for_signal())]
        if self.leading is not None:
            ends.append(self.leading)
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ends[0].cancel()
        await asyncio.gather(ends[0], return_exceptions=True)
        await self.stop()
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Give up the leadership, then stop as every plane does."""
        if self.leading is not None:
            self.leading.cancel()
            await asyncio.gather(self.leading, return_exceptions=True)
        await super().stop()

    def _describe(self) -> pool_pb2.GetServerInfoResponse:
        return pool_pb2.GetServerInfoResponse(version=release(), incarnation=self.core.incarnation)

    async def _lead(self, elector: Elector) -> None:
        """Stand by until elected, serve while leading, and refuse calls again at the end."""
        async with elector.lead() as incarnation:
            try:
                self.core.incarnation = self.metrics.incarnation = incarnation
                self._gate.stands_by = False
                self.metrics.leads = True
                self._set_serving(True)
                _LOGGER.info("leads incarnation=%d", incarnation)
                await asyncio.Event().wait()
            finally:
                self._gate.stands_by = True
                self.metrics.leads = False
                self._set_serving(False)

    async def _finish(self) -> None:
        await self._page.stop()
        self.ticks.cancel()
        self.work.cancel()


async def _tick(core: ControlPlane, service: SessionService) -> None:
    """Until cancelled, end expired leases and cut sequences whose blocks others wait for."""
    while True:
        delay_s = _LONGEST_TICK_S
        try:
            delay_s = min(core.tick(), delay_s)
            service.flush()
        except Exception as error:  # a bug; it must not stop this loop
            _LOGGER.error("tick failed error=%s", frames_of(error))
        await asyncio.sleep(max(delay_s, 0.001))


def elector_of(election: str, address: str, *, ttl_s: int) -> Elector:
    """Return the elector for an election's URL. ``election``: "file:/path",
    "kubernetes://namespace/name", or of a scheme that an installed package provides. ``address``:
    of this process. Raises InvalidRequestError for the field "election".
    """
    parts = urlsplit(election)
    name = parts.path.strip("/")
    if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return FileElector(Path(parts.path))
    if parts.scheme == "kubernetes" and parts.netloc and name:
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        if not host:
            raise InvalidRequestError(
                "this process is not in a pod: KUBERNETES_SERVICE_HOST is not set", field="election"
            )
        api = KubernetesApi.of_pod(host, os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
        return KubernetesElector(api, parts.netloc, name, address, ttl_s=ttl_s)
    for entry in entry_points(group="kvplane.electors", name=parts.scheme):
        elector: Elector = entry.load()(election, address, ttl_s=ttl_s)
        return elector
    raise InvalidRequestError(
        "must be file:/PATH, kubernetes://NAMESPACE/NAME or, where kvplane[etcd] is installed,"
        " etcd://HOST:PORT,HOST:PORT/NAME",
        field="election",
    )
