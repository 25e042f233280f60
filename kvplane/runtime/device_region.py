"""A region on the GPU that a data plane shares: opened by CUDA IPC, in order with its kernels."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import torch

from kvplane.errors import KvplaneError
from kvplane.execution.shard_execution import ShardExecution
from kvplane.transport.local import packets
from kvplane.transport.local.connection import LocalConnection
from kvplane.wire.error_messages import from_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import local_pb2

_LOGGER: Final = logging.getLogger(__name__)
_MOST_BYTES: Final = 2**40
# Data planes whose GPU's memory could not be opened, which is logged once for each.
_NOT_SHARED: Final[set[str]] = set()


def gpu_of(tensor: torch.Tensor) -> int | None:
    """Return the index of the GPU that a tensor is on; None for a tensor on no GPU."""
    return tensor.device.index if tensor.is_cuda else None


def cuda_module() -> ModuleType | None:
    """Return the module that opens GPU memory; None if CUDA kernels are missing or too old."""
    if find_spec("kvplane_kernels") is None or find_spec("kvplane_kernels._cuda") is None:
        return None
    module = import_module("kvplane_kernels._cuda")
    return module if hasattr(module, "open_shared") else None


class DeviceRegion:
    """GPU memory of a data plane, opened in this process by ``open_region``. ``whole``: uint8
    [size_bytes]. When no tensor of it is left, the memory is closed, and the data plane frees it.
    """

    def __init__(self, region_id: int, memory: Any) -> None:
        """``memory``: as ``open_shared`` of the native module returns it."""
        self.region_id = region_id
        self.whole: torch.Tensor = torch.utils.dlpack.from_dlpack(memory.dlpack())
        # The stream that last read an output: another one would not wait for it by itself.
        self._stream: torch.cuda.Stream | None = None

    def place(self, sizes_bytes: Sequence[int]) -> list[int] | None:
        """Return offsets in the region for ranges of these sizes: see ``packets.place``."""
        return packets.place(sizes_bytes, len(self.whole))

    def follow(self) -> None:
        """Have this thread's stream wait for earlier reads of the region, before it is written."""
        if self.whole.is_cuda:
            stream, before = torch.cuda.current_stream(self.whole.device), self._stream
            if before is not None and before != stream:
                stream.wait_stream(before)
            self._stream = stream

    def settle(self) -> None:
        """Wait for the writes to the region since ``follow``: the data plane's kernels are not
        ordered after this process's streams.
        """
        if self._stream is not None:
            self._stream.synchronize()


def open_region(execution: ShardExecution, gpu: int) -> DeviceRegion | None:
    """Open the data plane's region for tensors on this GPU. Returns None and logs why if the data
    plane is on another GPU or has no room, or if the memory cannot be opened, as in a container
    without the machine's IPC.
    """
    native, local = cuda_module(), execution.local
    if native is None or local is None or not local.cuda_device_uuid:
        return None
    try:
        uuid = native.device_uuid(gpu)
        if uuid != local.cuda_device_uuid:
            raise ValueError(f"its GPU is {local.cuda_device_uuid}, not {uuid}")
        given = execution.ask_local(partial(_share, uuid))
    except (RuntimeError, ValueError, KvplaneError) as error:
        _note_not_shared(execution, error)
        return None
    if given is None:
        return None
    message, file = given
    try:
        if file < 0 or message.cuda_device_uuid != uuid or message.size_bytes > _MOST_BYTES:
            raise ValueError("the region is not what was asked for")
        # The native module checks the handle's length, and the size against what was allocated.
        memory = native.open_shared(
            device=gpu, handle=message.cuda_ipc_handle, num_bytes=message.size_bytes, file=file
        )
        return DeviceRegion(message.region_id, memory)
    except (RuntimeError, ValueError) as error:
        _note_not_shared(execution, error)
        return None
    finally:
        if file >= 0:
            os.close(file)


def _share(
    cuda_device_uuid: str, local: LocalConnection, timeout_s: float
) -> tuple[local_pb2.MemoryRegion, int]:
    """Request a region on the data plane's GPU, which has to be this one. Returns the region, and a
    file to keep open as long as it; -1 if none came. Raises the KvplaneError that is answered.
    """
    share = local_pb2.ShareDeviceMemory(cuda_device_uuid=cuda_device_uuid)
    local.send(pb.ExecuteRequest(share=share).SerializeToString())
    packet, file = local.receive_file(timeout_s)
    answer = packets.parse(pb.ExecuteResponse, packet)
    if answer.HasField("error"):
        raise from_wire(answer.error)
    regions = answer.joined.regions
    return regions[0] if len(regions) == 1 else local_pb2.MemoryRegion(), file


def _note_not_shared(execution: ShardExecution, why: object) -> None:
    """Log why tensors have to leave the GPU, once for each data plane."""
    if execution.target not in _NOT_SHARED:
        _NOT_SHARED.add(execution.target)
        _LOGGER.warning("no GPU memory with %s, copying: %s", execution.target, why)
