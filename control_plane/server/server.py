"""The control plane put together: core, servicer, gRPC server, metrics, and the clock that ends
leases.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
from dataclasses import dataclass
from typing import Final

from control_plane.planning.core import ControlPlane
from control_plane.server import codec
from control_plane.server.config import ControlPlaneConfig
from control_plane.server.metrics import ControlPlaneMetrics
from control_plane.server.registration_server import Registrar
from control_plane.server.service import SERVICE, ControlPlaneService
from kvplane.serving import server as serving
from kvplane.serving.interceptor import ErrorInterceptor
from kvplane.serving.logs import frames_of
from kvplane.serving.metrics import MetricsEndpoint, serve_metrics
from kvplane.v1.control_pb2_grpc import add_ControlPlaneServiceServicer_to_server

_LOGGER: Final = logging.getLogger(__name__)
_LONGEST_TICK_S: Final = 1.0


@dataclass
class ControlPlaneServer:
    """A control plane that serves. Made by ``start``, ended by ``run_until_signal`` or ``stop``."""

    core: ControlPlane
    metrics: ControlPlaneMetrics
    ticks: asyncio.Task[None]
    _config: ControlPlaneConfig
    _server: serving.Server
    _service: ControlPlaneService
    _endpoint: MetricsEndpoint | None

    @classmethod
    async def start(cls, config: ControlPlaneConfig) -> ControlPlaneServer:
        """Serve as ``config`` says, on the running event loop. Raises OSError when an address can
        not be bound or the port file not be written.
        """
        incarnation = config.incarnation or time.time_ns()
        core = ControlPlane(
            incarnation=incarnation, config=config.core, clock=time.monotonic, seal=codec.seal
        )
        metrics = ControlPlaneMetrics(incarnation)
        metrics.watch_pools(
            asyncio.get_running_loop(),
            lambda: [core.describe_pool(pool_id) for pool_id in core.list_pools()],
        )
        registrar = Registrar(core, heartbeat_s=config.heartbeat_s)
        service = ControlPlaneService(core, registrar, metrics, _version())
        server = serving.build(
            config.bind,
            tls=config.tls,
            max_message_bytes=config.max_message_bytes,
            interceptors=[ErrorInterceptor(metrics.rpc)],
        )
        add_ControlPlaneServiceServicer_to_server(service, server.grpc_server)
        endpoint = None
        if config.metrics_port >= 0:
            endpoint = serve_metrics(metrics.registry, server.host, config.metrics_port)
        await server.start([SERVICE])
        ticks = asyncio.create_task(_tick(core, registrar, metrics))
        self = cls(core, metrics, ticks, config, server, service, endpoint)
        _LOGGER.info("metrics port=%s incarnation=%d", self.metrics_port, incarnation)
        try:
            serving.announce(server, config.port_file)
        except OSError:
            await self.stop()
            raise
        return self

    @property
    def address(self) -> str:
        """Where clients reach it, "host:port"."""
        return self._server.address

    @property
    def metrics_port(self) -> int | None:
        """Port of ``/metrics``; None when it is off."""
        return self._endpoint.port if self._endpoint is not None else None

    async def run_until_signal(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop."""
        await serving.wait_for_signal()
        await self.stop()

    async def stop(self) -> None:
        """Refuse new calls, answer those in flight, end the streams, and return when all is
        quiet.
        """
        _LOGGER.info("stopping grace_s=%g", self._config.grace_s)
        self._service.stop()
        await self._server.stop(self._config.grace_s)
        self.ticks.cancel()
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)
        _LOGGER.info("stopped")


async def _tick(core: ControlPlane, registrar: Registrar, metrics: ControlPlaneMetrics) -> None:
    """End leases as they run out."""
    while True:
        delay_s = _LONGEST_TICK_S
        try:
            num_open = _num_sessions(core)
            delay_s = min(core.tick(), delay_s)
            metrics.sessions_expired.inc(num_open - _num_sessions(core))
            registrar.flush()
        except Exception as error:  # a bug, but one pool's must not end every pool's leases
            _LOGGER.error("tick failed error=%s", frames_of(error))
        await asyncio.sleep(max(delay_s, 0.001))


def _num_sessions(core: ControlPlane) -> int:
    return sum(core.describe_pool(pool_id).num_sessions for pool_id in core.list_pools())


def _version() -> str:
    try:
        return importlib.metadata.version("kvplane")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0+unknown"
