"""The data plane put together: executor, servicer, gRPC server, registration, metrics."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from data_plane.executor import Executor
from data_plane.kernels.backend import Kernels
from data_plane.server.build import build_executor
from data_plane.server.config import DataPlaneConfig
from data_plane.server.metrics import DataPlaneMetrics
from data_plane.server.registration_client import Registrar
from data_plane.server.service import SERVICE, DataPlaneService
from data_plane.server.worker_thread import Lane
from kvplane.errors import InternalError
from kvplane.serving import server as serving
from kvplane.serving.interceptor import ErrorInterceptor
from kvplane.serving.logs import frames_of
from kvplane.serving.metrics import MetricsEndpoint, serve_metrics
from kvplane.v1.data_pb2_grpc import add_DataPlaneServiceServicer_to_server

_LOGGER: Final = logging.getLogger(__name__)
_LOST: Final = "the device has failed for good: only a new process can use it again"


@dataclass
class DataPlaneServer:
    """A data plane that serves. Made by ``start``, ended by ``run_until_signal`` or ``stop``.

    Health says NOT_SERVING until the process has first registered with a control plane, and again
    once the device has failed for good.
    """

    executor: Executor
    metrics: DataPlaneMetrics
    registered: asyncio.Event
    lost: asyncio.Event
    """The device has failed for good: only a new process can use it again."""
    _config: DataPlaneConfig
    _server: serving.Server
    _service: DataPlaneService
    _lane: Lane
    _endpoint: MetricsEndpoint | None
    _registration: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, config: DataPlaneConfig, kernels: Kernels | None = None
    ) -> DataPlaneServer:
        """Serve as ``config`` says, on the running event loop, and begin to register.
        ``kernels``: those to run on; None for those of the device.

        Raises OSError when an address can not be bound or the port file not be written, and what
        ``build_executor`` raises.
        """
        metrics = DataPlaneMetrics()
        executor = build_executor(config, metrics.observe_command, kernels)
        metrics.watch(executor)
        lane = Lane(executor.use_own_stream)
        service = DataPlaneService(
            executor, lane, version=_version(), max_message_bytes=config.max_message_bytes
        )
        server = serving.build(
            config.bind,
            tls=config.tls,
            max_message_bytes=config.max_message_bytes,
            interceptors=[ErrorInterceptor(metrics.rpc)],
        )
        add_DataPlaneServiceServicer_to_server(service, server.grpc_server)
        endpoint = None
        if config.metrics_port >= 0:
            endpoint = serve_metrics(metrics.registry, server.host, config.metrics_port)
        await server.start([SERVICE], serving=False)
        self = cls(
            executor,
            metrics,
            asyncio.Event(),
            asyncio.Event(),
            config,
            server,
            service,
            lane,
            endpoint,
        )
        self._watch_device()
        registrar = Registrar(
            executor,
            lane,
            config.control_plane,
            address=config.advertise or server.address,
            tls=config.control_tls,
            on_change=self._on_registration,
        )
        self._registration = asyncio.create_task(registrar.run())
        self._registration.add_done_callback(_log_failure)
        _LOGGER.info(
            "pool pool_id=%s epoch=%d num_device_blocks=%d num_host_blocks=%d metrics_port=%s",
            executor.pool_id,
            executor.epoch,
            executor.pools.device_tier.shape[0],
            executor.pools.host_tier.shape[0],
            self.metrics_port,
        )
        try:
            serving.announce(server, config.port_file)
        except OSError:
            await self.stop()
            raise
        return self

    @property
    def address(self) -> str:
        """Where the server listens, "host:port"."""
        return self._server.address

    @property
    def metrics_port(self) -> int | None:
        """Port of ``/metrics``; None when it is off."""
        return self._endpoint.port if self._endpoint is not None else None

    async def run_until_signal(self) -> None:
        """``run_until`` SIGTERM or SIGINT."""
        await self.run_until(serving.wait_for_signal())

    async def run_until(self, end: Coroutine[Any, Any, object]) -> None:
        """Serve until ``end`` returns, then stop. Raises InternalError when it was the device that
        ended it: health has said so then, and the server has stopped too.
        """
        ends = [asyncio.create_task(end), asyncio.create_task(self._until_lost())]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            await self.stop()
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Leave the control plane, refuse new calls, answer those in flight, and return when all
        is quiet.
        """
        _LOGGER.info("stopping grace_s=%g", self._config.grace_s)
        if self._registration is not None:
            self._registration.cancel()
            await asyncio.gather(self._registration, return_exceptions=True)
        self._service.stop()
        await self._server.stop(self._config.grace_s)
        await asyncio.to_thread(self._lane.close)
        await asyncio.to_thread(self.executor.finish)
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)
        _LOGGER.info("stopped")

    async def _on_registration(self, registered: bool) -> None:
        self.metrics.registered.set(registered)
        if registered and not self.registered.is_set():
            self.registered.set()
            await self._set_serving(not self.lost.is_set())

    async def _until_lost(self) -> None:
        await self.lost.wait()
        await self._set_serving(False)
        raise InternalError(_LOST)

    async def _set_serving(self, serving: bool) -> None:
        for service in ("", SERVICE):
            await self._server.set_serving(service, serving)

    def _watch_device(self) -> None:
        """A thread that runs a command learns that the device is lost; the event loop acts."""
        loop = asyncio.get_running_loop()

        def lose() -> None:
            _LOGGER.error(_LOST)
            with suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(self.lost.set)

        self.executor.device_watch.when_lost(lose)


def _log_failure(task: asyncio.Task[None]) -> None:
    """Registering never ends by itself, so an end is a bug."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOGGER.error("registering has failed error=%s", frames_of(error))


def _version() -> str:
    try:
        return importlib.metadata.version("kvplane")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0+unknown"
