"""The data plane as a process: executor, gRPC service, registration and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

from data_plane.kernels.backend import Kernels
from data_plane.server.build import build_executor
from data_plane.server.config import DataPlaneConfig
from data_plane.server.files.tier import FileTier
from data_plane.server.local.endpoint import LocalEndpoint
from data_plane.server.metrics import DataPlaneMetrics
from data_plane.server.push.endpoint import PushEndpoint
from data_plane.server.registration_client import RegistrationClient
from data_plane.server.service import SERVICE, DataPlaneService
from data_plane.server.worker_thread import WorkerThread
from kvplane import __version__
from kvplane.errors import InternalError, KvplaneError
from kvplane.serving.observability.logs import frames_of
from kvplane.serving.plane_server import PlaneServer
from kvplane.serving.server import wait_for_signal
from kvplane.sync.passing_thread import call_in_passing
from kvplane.v1.data_pb2_grpc import add_DataPlaneServiceServicer_to_server

_LOGGER: Final = logging.getLogger(__name__)
_LOST: Final = "the device has failed for good: only a new process can use it again"


class DataPlaneServer(PlaneServer):
    """A data plane that serves. Created by ``start``, ended by ``run_until_signal`` or ``stop``.

    Its health is NOT_SERVING until it has first registered with a control plane, and again once the
    device has failed for good.
    """

    _registration: asyncio.Task[None]

    def __init__(self, config: DataPlaneConfig, kernels: Kernels | None = None) -> None:
        """Allocate the pools and bind the address; ``start`` then serves."""
        self.metrics = DataPlaneMetrics(config.pool_id)
        self.executor = call_in_passing(
            partial(build_executor, config, self.metrics.observe_command, kernels)
        )
        self.registered = asyncio.Event()
        self.lost = asyncio.Event()
        """The device has failed for good: only a new process can use it again."""
        self._loop = asyncio.get_running_loop()
        self._worker = worker = WorkerThread(
            self.executor.use_own_stream, spin_s=config.local_spin_s
        )
        self.files: FileTier | None = None
        """Blocks in files; None where there are none."""
        if config.file_tier_dir is not None:
            self.files = FileTier(
                self.executor,
                worker,
                folder=config.file_tier_dir,
                max_bytes=config.file_tier_bytes,
            )
        self.local: LocalEndpoint | None = None
        """Where engines on this machine get shared memory; None where none do."""
        if config.num_local_regions > 0:
            self.local = LocalEndpoint(
                self.executor,
                worker,
                folder=config.local_folder,
                num_regions=config.num_local_regions,
                region_bytes=config.local_region_bytes,
                num_device_regions=config.num_local_device_regions,
                on_error=self._count_rejection,
            )
        self.push: PushEndpoint | None = None
        """Blocks to and from other data planes; None where there are none."""
        if config.push_bind or config.push_to:
            self.push = PushEndpoint(config, self.executor, worker)
        self.metrics.watch(
            self.executor, lambda: worker.num_waiting, self.local, self.push, self.files
        )
        service = DataPlaneService(
            self.executor,
            self._worker,
            version=__version__,
            rejected=self.metrics.rpc.rejected,
            max_message_bytes=config.max_message_bytes,
            local=self.local,
            push=self.push,
            files=self.files,
            knows_callers=config.knows_callers,
        )
        super().__init__(
            config,
            SERVICE,
            service,
            add_DataPlaneServiceServicer_to_server,
            self.metrics,
        )

    @classmethod
    async def start(
        cls, config: DataPlaneConfig, kernels: Kernels | None = None
    ) -> DataPlaneServer:
        """Serve as set in ``config``, on the running event loop, and begin to register.
        ``kernels``: None for those of the device.

        Raises OSError when an address cannot be bound or the port file cannot be written, and what
        ``build_executor`` raises.
        """
        self = cls(config, kernels)
        executor = self.executor
        if self.local is not None:
            self.local.start()
        if self.push is not None:
            self.push.start()
        if self.files is not None:
            self.files.start()
        await self._serve(serving=False)
        self._watch_device()
        registration = RegistrationClient(
            executor,
            self._worker,
            config.control_plane,
            address=config.advertise or self.address,
            tls=config.control_tls,
            on_change=self._on_registration,
            files=self.files,
        )
        self._registration = asyncio.create_task(registration.run())
        self._registration.add_done_callback(_log_failure)
        _LOGGER.info(
            "pool pool_id=%s epoch=%d num_device_blocks=%d num_host_blocks=%d metrics_port=%s",
            executor.pool_id,
            executor.epoch,
            executor.pools.device_tier.shape[0],
            executor.pools.host_tier.shape[0],
            self.metrics_port,
        )
        await self._announce()
        return self

    async def run_until_signal(self) -> None:
        """``run_until`` SIGTERM or SIGINT."""
        await self.run_until(wait_for_signal())

    async def run_until(self, end: Coroutine[Any, Any, object]) -> None:
        """Serve until ``end`` returns, then stop. When the device fails for good, health becomes
        NOT_SERVING, the server stops, and InternalError is raised. When a later process has taken
        the shard over, the same happens, with StaleEpochError.
        """
        ends = [
            asyncio.create_task(end),
            asyncio.create_task(self._until_lost()),
            self._registration,
        ]
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
        """End the registration, then stop as every plane does."""
        self._registration.cancel()
        await asyncio.gather(self._registration, return_exceptions=True)
        await super().stop()

    async def _finish(self) -> None:
        if self.local is not None:
            self.local.stop()
        if self.push is not None:
            await asyncio.to_thread(self.push.stop, self._config.grace_s)
        if self.files is not None:
            await asyncio.to_thread(self.files.stop)
        await asyncio.to_thread(self._worker.close)
        await asyncio.to_thread(self.executor.finish)

    def _count_rejection(self, error: KvplaneError) -> None:
        """On any thread."""
        self._loop.call_soon_threadsafe(self.metrics.rpc.rejected.inc, error.reason)

    async def _on_registration(self, registered: bool) -> None:
        self.metrics.registered = registered
        if registered and not self.registered.is_set():
            self.registered.set()
            await self._set_serving(not self.lost.is_set())

    async def _until_lost(self) -> None:
        await self.lost.wait()
        await self._set_serving(False)
        raise InternalError(_LOST)

    def _watch_device(self) -> None:
        """Set ``lost`` when the device is lost, which a thread that runs a command finds out."""
        loop = asyncio.get_running_loop()

        def lose() -> None:
            _LOGGER.error(_LOST)
            with suppress(RuntimeError):  # the loop has already ended
                loop.call_soon_threadsafe(self.lost.set)

        self.executor.device_watch.when_lost(lose)


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log why the registration ended, if only a bug can have caused that."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, KvplaneError):
        _LOGGER.error("registration stopped error=%s", frames_of(error))
