"""Regions on this process's GPU, which engines on the same GPU open by CUDA IPC.

    share: the engine's GPU ──►  allocated and cleared here, 64 bytes of handle, a pipe's end
    the engine closes the memory, then the pipe's end; or it dies, and the system closes both
    ──► the region, which its connection uses no more, is freed

This process makes the memory and opens none. So an engine that dies takes no memory away from
kernels that run here, nothing that a client sends is opened, and sizes are those of this process.
CUDA leaves undefined what a client does with memory that was freed before it was closed, so a
region whose client holds on to it is kept, and counted.
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
from kvplane.v1 import data_pb2 as pb

# That clients had not let go when their server stopped. With a reference of its own: the system
# frees them when this process has ended, where Python would before that, with its modules.
_KEPT: Final[list[DeviceRegion]] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_KEPT))


class DeviceRegion(Region):
    """Memory of one GPU, of which a connection may have one. ``file``: a pipe's end that the client
    is to have for as long as it has the memory open.
    """

    id, is_on_device = 2, True

    def __init__(self, memory: Any, cuda_device_uuid: str) -> None:
        """``memory``: the native module's. Raises OSError where there can be no pipe."""
        super().__init__(torch.utils.dlpack.from_dlpack(memory.dlpack()))
        self._own, self.file = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._own, 0)  # for nothing but that no end is open any more
        self.message = pb.MemoryRegion(
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
        """Once the client has its own, or has gone."""
        file, self.file = getattr(self, "file", -1), -1
        if file >= 0:
            os.close(file)

    @property
    def is_let_go(self) -> bool:
        """Whether the client has closed the memory, or has died."""
        return bool(self._poll.poll(0))


class DeviceRegions:
    """All of one data plane. Used on the worker thread."""

    def __init__(
        self,
        kernels: Kernels,
        *,
        num_regions: int,
        region_bytes: int,
        end_use: Callable[[DeviceRegion], None],
    ) -> None:
        """``num_regions``: of ``region_bytes`` each, that may be allocated at the same time.
        ``end_use``: has the connection of a region, if there still is one, use it no more.
        """
        self._kernels = kernels
        self._end_use = end_use
        self._num_regions = num_regions
        self._region_bytes = region_bytes
        self._regions: list[DeviceRegion] = []
        self.cuda_device_uuid = kernels.device_uuid if num_regions else ""
        """Of the GPU; empty where there is none."""

    @property
    def num_regions(self) -> int:
        """Allocated, those included that clients have not let go after their connection's end."""
        return len(self._regions)

    def new(self, request: pb.ShareDeviceMemory) -> DeviceRegion:
        """A region of zeros. Raises InvalidRequestError for tensors on another GPU,
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
                f"all {self._num_regions} regions on this data plane's GPU are in use, or were not "
                "let go",
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
        """Free what clients have let go."""
        let_go = [region for region in self._regions if region.is_let_go]
        if let_go:
            with suppress(InternalError):  # a lost device: there is nothing to wait for
                self._kernels.streams.drain()
            for region in let_go:
                self._end_use(region)
                self._regions.remove(region)

    def close(self) -> None:
        """Free what clients have let go, and leave the rest to the end of this process."""
        self.sweep()
        _KEPT.extend(self._regions)
        self._regions.clear()
