"""The data plane as a process: executor, gRPC service, registration and metrics; and the program,
which runs it until a signal stops it.

The executor is built from settings: the layout is read, the memory measured, the pools allocated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from data_plane import limits
from data_plane.blocks_from_outside import BlocksFromOutside, load_plug_ins
from data_plane.execution.commands import Observer
from data_plane.execution.executor import Executor
from data_plane.kernels.backend import Kernels, kernels_of
from data_plane.kernels.device.devices import choose_device, this_machine
from data_plane.memory.sizing import fit_blocks, free_bytes, measure_num_blocks, share_blocks
from data_plane.server.calls import Calls
from data_plane.server.config import PROGRAM, DataPlaneSettings
from data_plane.server.file_tier import FileTier
from data_plane.server.local.endpoint import LocalEndpoint
from data_plane.server.metrics import DataPlaneMetrics
from data_plane.server.registration_client import RegistrationClient
from data_plane.server.service import BLOCKS, EXECUTIONS, BlockService, ExecutionService
from data_plane.server.worker_thread import WorkerThread
from kvplane import tracing
from kvplane.block_pattern import BlockPattern
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    NeverFitsError,
    StaleEpochError,
)
from kvplane.layout import KEYS_AND_VALUES, LATENT, LayerGroup, Layout
from kvplane.models.hf import layout_from_hf
from kvplane.release import release
from kvplane.serving import event_loop
from kvplane.serving.config import memory_of
from kvplane.serving.observability import logs
from kvplane.serving.observability.logs import frames_of
from kvplane.serving.plane_server import PlaneServer, Service
from kvplane.serving.server import wait_for_signal
from kvplane.serving.server_service import SERVER, ServerService
from kvplane.serving.settings import EXIT_BAD_SETTINGS, log_settings, parse
from kvplane.shard import Shard
from kvplane.sync.short_thread import call_in_short_thread
from kvplane.wire.protocol import MAX_MESSAGE_BYTES
from kvplane.wire.v1 import pool_pb2, types_pb2
from kvplane.wire.v1.execution_pb2_grpc import (
    add_BlockServiceServicer_to_server,
    add_ExecutionServiceServicer_to_server,
)
from kvplane.wire.v1.pool_pb2_grpc import add_ServerServiceServicer_to_server

_LOGGER: Final = logging.getLogger(__name__)
_LOST: Final = "the device has failed for good: only a new process can use it again"
_PAGE_BYTES: Final = 4096


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the data plane's program with the settings of ``argv`` and ``environ``. Returns the exit
    code. Exits for bad settings.
    """
    config = parse(DataPlaneSettings, PROGRAM, argv, environ, "kvplane data")
    logs.setup(config.log_level, config.log_format)
    log_settings(config, logging.getLogger(PROGRAM))
    try:
        tracing.setup("kvplane-data-plane", environ)
        event_loop.run(_serve(config))
    except (InternalError, StaleEpochError) as error:  # the device failed; the shard was taken over
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 1
    except KvplaneError as error:  # a model, layout or device that cannot be used
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return EXIT_BAD_SETTINGS
    except (OSError, RuntimeError) as error:  # an address in use, or memory that is not there
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 1
    return 0


async def _serve(config: DataPlaneSettings) -> None:
    server = await DataPlaneServer.start(config)
    await server.run_until_signal()


class DataPlaneServer(PlaneServer):
    """A data plane that serves. Created by ``start``, ended by ``run_until_signal`` or ``stop``.

    Its health is NOT_SERVING until it has first registered with a control plane, and again once the
    device has failed for good.
    """

    _registration: asyncio.Task[None]

    def __init__(
        self,
        config: DataPlaneSettings,
        kernels: Kernels | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Allocate the pools and bind the address; ``start`` then serves."""
        self.metrics = DataPlaneMetrics(config.pool_id)
        self._advertise = config.advertise
        self.executor = call_in_short_thread(
            partial(build_executor, config, self.metrics.observe_command, kernels, layout)
        )
        self.registered = asyncio.Event()
        self.lost = asyncio.Event()
        """Set once the device has failed for good: only a new process can use it again."""
        self._loop = asyncio.get_running_loop()
        self._worker = worker = WorkerThread(
            self.executor.use_own_stream, spin_s=limits.LOCAL_SPIN_S
        )
        self.files: FileTier | None = None
        """Keeps blocks in files; None without --file-tier-dir."""
        if config.file_tier_dir is not None:
            self.files = FileTier(
                self.executor,
                worker,
                folder=config.file_tier_dir,
                max_bytes=config.file_tier_bytes,
                num_uses=config.file_tier_after,
            )
        outside = BlocksFromOutside(self.executor, worker, config, config.peer_tls)
        self.plug_ins = load_plug_ins(config.plug_ins, outside)
        self.local: LocalEndpoint | None = None
        """Gives engines on this machine shared memory; None without regions."""
        if config.num_local_regions > 0:
            self.local = LocalEndpoint(
                self.executor,
                worker,
                folder=config.local_folder,
                num_regions=config.num_local_regions,
                region_bytes=config.local_region_bytes,
                num_device_regions=limits.NUM_LOCAL_DEVICE_REGIONS,
                on_error=self._count_rejection,
            )
        self.metrics.watch(
            self.executor, lambda: worker.num_waiting, self.local, self.files, self.plug_ins
        )
        calls = Calls(self.executor, worker, knows_callers=config.knows_callers)
        executions = ExecutionService(
            calls, self.executor, rejected=self.metrics.rpc.rejected, local=self.local
        )
        blocks = BlockService(calls, self.executor, files=self.files)
        about = ServerService(self._describe)
        super().__init__(
            config,
            [
                Service(SERVER, partial(add_ServerServiceServicer_to_server, about)),
                Service(
                    EXECUTIONS,
                    partial(add_ExecutionServiceServicer_to_server, executions),
                    executions.stop,
                ),
                Service(BLOCKS, partial(add_BlockServiceServicer_to_server, blocks)),
                *(Service(plug_in.service, plug_in.add_to) for plug_in in self.plug_ins),
            ],
            self.metrics,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )

    @classmethod
    async def start(
        cls,
        config: DataPlaneSettings,
        kernels: Kernels | None = None,
        layout: Layout | None = None,
    ) -> DataPlaneServer:
        """Start a data plane with the settings ``config``, on the running event loop, and begin to
        register. ``kernels``: None for those of the device. ``layout``: None for that of
        ``config``.

        Raises OSError when an address cannot be bound or the port file cannot be written, and as
        ``build_executor``.
        """
        self = cls(config, kernels, layout)
        executor = self.executor
        if self.local is not None:
            self.local.start()
        for plug_in in self.plug_ins:
            plug_in.start()
        if self.files is not None:
            self.files.start()
        await self._serve(serving=False)
        self._watch_device()
        registration = RegistrationClient(
            executor,
            self._worker,
            config.control_plane,
            address=self._advertised,
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
        """Serve until SIGTERM or SIGINT, as ``run_until`` does."""
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

    def _describe(self) -> pool_pb2.GetServerInfoResponse:
        executor = self.executor
        shard = types_pb2.ShardInfo(
            shard=executor.shard.to_proto(),
            epoch=executor.epoch,
            address=self._advertised,
            connected=self.metrics.registered,
            has_file_tier=executor.blocks.is_watched,
        )
        return pool_pb2.GetServerInfoResponse(
            version=release(),
            incarnation=executor.incarnation,
            pool_id=executor.pool_id,
            shard=shard,
            device=str(executor.device),
        )

    @property
    def _advertised(self) -> str:
        """Return the address at which clients reach this data plane, "host:port"."""
        return self._advertise or self.address

    async def _finish(self) -> None:
        if self.local is not None:
            self.local.stop()
        for plug_in in self.plug_ins:
            await asyncio.to_thread(plug_in.stop, self._config.grace_s)
        if self.files is not None:
            await asyncio.to_thread(self.files.stop)
        await asyncio.to_thread(self._worker.close)
        await asyncio.to_thread(self.executor.finish)

    def _count_rejection(self, error: KvplaneError) -> None:
        """Count a rejection. Any thread may call it."""
        self._loop.call_soon_threadsafe(self.metrics.rpc.rejected.inc, error.reason)

    async def _on_registration(self, registered: bool) -> None:
        self.metrics.registered = registered
        if registered and not self.registered.is_set():
            self.registered.set()
            self._set_serving(not self.lost.is_set())

    async def _until_lost(self) -> None:
        await self.lost.wait()
        self._set_serving(False)
        raise InternalError(_LOST)

    def _watch_device(self) -> None:
        """Have the thread whose command finds the device lost set ``lost``."""
        loop = asyncio.get_running_loop()

        def lose() -> None:
            _LOGGER.error(_LOST)
            with suppress(RuntimeError):  # the loop has already ended
                loop.call_soon_threadsafe(self.lost.set)

        self.executor.device_watch.when_lost(lose)


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log why the registration ended, if only a bug can have caused it."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, KvplaneError):
        _LOGGER.error("registration stopped error=%s", frames_of(error))


def build_executor(
    config: DataPlaneSettings,
    observe: Observer | None = None,
    kernels: Kernels | None = None,
    layout: Layout | None = None,
) -> Executor:
    """Build an executor for ``config``. ``kernels``: None for those of the device in ``config``.
    ``layout``: None for that of ``config``.

    Raises InvalidRequestError for a model, layout or device that cannot be used, and
    NeverFitsError when the memory has no room for a block, or for the blocks asked for.
    """
    device = choose_device(config.device, this_machine)
    kernels = kernels if kernels is not None else kernels_of(device, config.num_threads)
    _LOGGER.info("kernels backend=%s %s", kernels.backend, kernels.detail)
    layout = layout or load_layout(config, kernels.cache_kinds)
    shard = shard_of(config, layout)
    num_device_blocks = config.num_device_blocks
    expected_tokens = limits.EXPECTED_CONTEXT_TOKENS
    host_blocks = share_blocks(layout, config.num_host_blocks, expected_tokens)
    block_bytes = partial(shard.block_bytes, layout)
    memory = memory_of(config.memory)
    if num_device_blocks == 0 and isinstance(memory, int):
        num_device_blocks = fit_blocks(layout, memory, expected_tokens, block_bytes)
        if num_device_blocks < 1:
            raise NeverFitsError(f"no block fits in {memory} bytes", field="memory")
    elif num_device_blocks == 0:
        free = free_bytes(device)
        on_cpu = device.type == "cpu"
        host_tier_bytes = sum(n * block_bytes(i) for i, n in enumerate(host_blocks)) * on_cpu
        num_shared = limits.NUM_LOCAL_DEVICE_REGIONS if config.num_local_regions else 0
        shared_bytes = 0 if on_cpu else num_shared * config.local_region_bytes
        num_device_blocks = measure_num_blocks(
            free,
            lambda usable: fit_blocks(layout, usable, expected_tokens, block_bytes),
            utilization=memory,
            reserve_bytes=host_tier_bytes + shared_bytes,
            scratch_bytes=kernels.scratch_bytes,
        )
        _LOGGER.info("measured free_bytes=%d num_device_blocks=%d", free, num_device_blocks)
    device_blocks = share_blocks(layout, num_device_blocks, expected_tokens)
    device_bytes = sum(n * block_bytes(group) for group, n in enumerate(device_blocks))
    num_tokens = num_device_blocks * layout.block_size_tokens
    text = "device tier: %s blocks = %s tokens = %s GiB"
    figures = f"{num_device_blocks:,}", f"{num_tokens:,}", f"{device_bytes / 2**30:.1f}"
    _LOGGER.info(text, *figures)
    _require_room(device, device_blocks, host_blocks, block_bytes, kernels.scratch_bytes)
    executor = Executor(
        layout,
        pool_id=config.pool_id,
        num_device_blocks=device_blocks,
        num_host_blocks=host_blocks,
        shard=shard,
        device=device,
        kernels=kernels,
        epoch=config.epoch,
        observe=observe,
    )
    if device.type == "cpu":
        for tier_key in executor.pools.num_blocks:
            _touch(executor.pools.tier(tier_key))
    return executor


def _require_room(
    device: torch.device,
    device_blocks: Sequence[int],
    host_blocks: Sequence[int],
    block_bytes: Callable[[int], int],
    scratch_bytes: int,
) -> None:
    """Raise NeverFitsError unless tiers of so many blocks of each layer group fit in the free
    memory, beside ``scratch_bytes`` of the device for its kernels. Otherwise the system, which
    overcommits memory, would kill the process later, and a GPU would fail in the middle of a plan.
    ``block_bytes``: of a block of each group.
    """
    host = torch.device("cpu")
    taken = 0
    for field, blocks, where, kept in (
        ("num_host_blocks", host_blocks, host, 0),
        ("num_device_blocks", device_blocks, device, scratch_bytes),
    ):
        asked = sum(n * block_bytes(group) for group, n in enumerate(blocks))
        available = free_bytes(where) - (taken if where == host else 0) - kept
        if asked > available:
            raise NeverFitsError(
                f"{max(blocks)} blocks take {asked} bytes, {available} are available on {where}",
                field=field,
            )
        taken += asked


def _touch(tier: torch.Tensor) -> None:
    """Write to each page of a tier once, so that the system allocates it now."""
    if tier.numel():
        tier.view(torch.uint8).view(-1)[::_PAGE_BYTES].zero_()


def shard_of(config: DataPlaneSettings, layout: Layout) -> Shard:
    """Return the shard that the settings name. Raises InvalidRequestError if it does not fit."""
    index, num_shards = config.shard_index, config.num_shards
    layers, kv_heads = config.layer_range, config.kv_head_range
    if layers is None and kv_heads is None and not config.shard_copy:
        return Shard.of_heads(layout, index, num_shards)
    whole = Shard.whole(layout)
    first_layer, num_layers = layers or (whole.first_layer, 0)
    first_kv_head, num_kv_heads = kv_heads or (0, 0)
    shard = Shard(
        index,
        num_shards,
        first_layer,
        num_layers or whole.first_layer + whole.num_layers - first_layer,
        first_kv_head,
        num_kv_heads or whole.num_kv_heads - first_kv_head,
        config.shard_copy,
    )
    shard.layers(layout)  # raises if it does not fit
    return shard


def load_layout(
    config: DataPlaneSettings, cache_kinds: Collection[str] = (KEYS_AND_VALUES, LATENT)
) -> Layout:
    """Read the layout that the settings name; a model's layout has only groups of ``cache_kinds``.
    Raises InvalidRequestError.
    """
    if config.model is not None:
        return layout_from_hf(
            config.model,
            block_size_tokens=config.block_size_tokens,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype or None,
            latent=config.latent and LATENT in cache_kinds,
        )
    if config.opaque_page_bytes:
        return Layout.of_opaque_pages(
            config.model_id,
            config.opaque_page_bytes,
            block_size_tokens=config.block_size_tokens,
        )
    if config.layout is None:
        raise InvalidRequestError("give --model, --layout or --opaque-page-bytes", field="model")
    return layout_from_json(config.layout)


def _pattern_of(group: Mapping[str, Any]) -> dict[str, BlockPattern]:
    pattern = group.get("block_pattern")
    return {} if pattern is None else {"block_pattern": BlockPattern(**pattern)}


def layout_from_json(path: Path) -> Layout:
    """Read a ``kvplane.layout.Layout`` from a JSON file. Raises InvalidRequestError."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        groups = tuple(
            LayerGroup(**{**group, "layers": tuple(group["layers"]), **_pattern_of(group)})
            for group in fields.pop("groups")
        )
        return Layout(groups=groups, **fields)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", field="layout") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequestError(f"{path} is not a layout: {error}", field="layout") from error
