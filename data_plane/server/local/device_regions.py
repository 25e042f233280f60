"""Regions on this process's GPU, which engines on the same GPU open by CUDA IPC.

    share: the engine's GPU ──►  allocated and cleared here, 64 bytes of handle, a pipe's end
    the engine closes the memory, then the pipe's end; or it dies, and the system closes both
    ──► its connection stops using the region, which is freed

This process allocates the memory and opens no handles. So an engine that dies takes no memory away
from kernels that run here, and this process chooses the sizes. In CUDA a client's accesses are
undefined once memory is freed before the client closed it, so a region is kept, and counted, until
its client closes it.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch

from data_plane.kernels.backend import Kernels
from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.server.local.region import Region
from kvplane.errors import InternalError, InvalidRequestError, QuotaExceededError
from kvplane.wire.v1 import local_pb2

# Regions that clients had not closed when their server stopped. The extra reference keeps Python
# from freeing them with its modules: the system frees them when this process has ended.
_KEPT: Final[list[DeviceRegion]] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_KEPT))


class DeviceRegion(Region):
    """Memory of the GPU that is shared with one client; a connection may have one. ``file``: a
    pipe's end, which the client keeps open for as long as the memory.
    """

    id, is_on_device = 2, True

    def __init__(self, memory: Any, cuda_device_uuid: str) -> None:
        """``memory``: the native module's. Raises OSError if no pipe can be made."""
        super().__init__(torch.utils.dlpack.from_dlpack(memory.dlpack()))
        self._own, self.file = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._own, 0)  # reports only that the other end is closed everywhere
        self.message = local_pb2.MemoryRegion(
            region_id=self.id,
            size_bytes=self.size_bytes,
            cuda_ipc_handle=memory.handle(),
            cuda_device_uuid=cuda_device_uuid,
        )

    def __del__(self) -> None:
        self.close_file()
        with suppress(AttributeError, OSError):
            os.close(self._own)

    def close_file(self) -> None:
        """Close this process's copy of ``file``, once the client has a copy or has gone."""
        file, self.file = getattr(self, "file", -1), -1
        if file >= 0:
            os.close(file)

    @property
    def is_let_go(self) -> bool:
        """Whether the client has closed the memory, or has died."""
        return bool(self._poll.poll(0))


class DeviceRegions:
    """The regions of GPU memory shared with clients. Used on the worker thread."""

    def __init__(
        self,
        kernels: Kernels,
        *,
        num_regions: int,
        region_bytes: int,
        end_use: Callable[[DeviceRegion], None],
    ) -> None:
        """``num_regions``: how many, of ``region_bytes`` each, may be allocated at the same time.
        ``end_use`` makes a region's connection, if there still is one, stop using it.
        """
        self._kernels = kernels
        self._end_use = end_use
        self._num_regions = num_regions
        self._region_bytes = region_bytes
        self._regions: list[DeviceRegion] = []
        self.cuda_device_uuid = kernels.device_uuid if num_regions else ""
        """UUID of the GPU; empty where regions cannot be allocated."""

    @property
    def num_regions(self) -> int:
        """Number of regions, also those that clients keep open after their connection's end."""
        return len(self._regions)

    def new(self, request: local_pb2.ShareDeviceMemory) -> DeviceRegion:
        """Allocate a region of zeros. Raises InvalidRequestError for tensors on another GPU,
        QuotaExceededError, and InternalError where the GPU has no memory or cannot share it.
        """
        if not self.cuda_device_uuid or request.cuda_device_uuid != self.cuda_device_uuid:
            raise InvalidRequestError(
                f"is not this data plane's GPU, {self.cuda_device_uuid or 'of which it has none'}",
                field="share.cuda_device_uuid",
            )
        self.sweep()
        if len(self._regions) >= self._num_regions:
            raise QuotaExceededError(
                f"all {self._num_regions} regions on this data plane's GPU are in use, or clients "
                "keep them open",
                field="share",
            )
        try:
            with device_errors():
                memory = self._kernels.share_memory(self._region_bytes)
            region = DeviceRegion(memory, self.cuda_device_uuid)
        except OSError as error:
            raise InternalError(f"no pipe for shared memory: {error}") from error
        self._regions.append(region)
        return region

    def sweep(self) -> None:
        """Free the regions that clients have closed."""
        let_go = [region for region in self._regions if region.is_let_go]
        if let_go:
            with suppress(InternalError):  # a lost device: there is nothing to wait for
                self._kernels.streams.drain()
            for region in let_go:
                self._end_use(region)
                self._regions.remove(region)

    def close(self) -> None:
        """Free the regions that clients have closed; keep the rest until this process ends."""
        self.sweep()
        _KEPT.extend(self._regions)
        self._regions.clear()
