"""Memory regions that this process made for one client, and the tensors in them.

The client may change any byte at any time. So a region's bytes are never used as anything but
tensors' elements: messages carry shapes and offsets, which are checked against the region's size.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Sequence
from typing import Final

import torch

from data_plane.memory.pool import TORCH_DTYPES
from kvplane.errors import InvalidRequestError
from kvplane.tensor import MAX_DIMENSIONS
from kvplane.transport.local.packets import ALIGNMENT_BYTES
from kvplane.wire.dtypes import dtype_from_wire
from kvplane.wire.v1 import types_pb2 as pb

# Otherwise the client could truncate the file, and this process would die of SIGBUS.
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAX_EXTENT: Final = 2**31 - 1


class Region:
    """Memory shared with one client, zeroed at first: ``whole``, uint8 [size_bytes]."""

    id: int
    """Id of the region, unique in its connection."""
    is_on_device: bool
    """Whether the memory is on the GPU, where kernels access it directly."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.size_bytes = len(whole)
        self._whole = whole

    def tensor(self, message: pb.Tensor, field: str) -> torch.Tensor:
        """Return a view of the tensor that ``message`` describes. Raises InvalidRequestError naming
        the part of ``field``.
        """
        dtype = TORCH_DTYPES[dtype_from_wire(message.dtype, field=f"{field}.dtype")]
        shape = tuple(message.shape)
        if len(shape) > MAX_DIMENSIONS or not all(0 <= n <= _MAX_EXTENT for n in shape):
            raise InvalidRequestError(
                f"must be at most {MAX_DIMENSIONS} extents of 0 to {_MAX_EXTENT}",
                field=f"{field}.shape",
            )
        return self.view(message.memory, dtype, shape, f"{field}.memory")

    def view(
        self, place: pb.MemoryRange, dtype: torch.dtype, shape: Sequence[int], field: str
    ) -> torch.Tensor:
        """Return a view of a range. Raises InvalidRequestError naming the part of ``field``."""
        num_elements = math.prod(shape)
        first, num_bytes = place.offset_bytes, num_elements * dtype.itemsize
        if first % ALIGNMENT_BYTES or not 0 <= first <= self.size_bytes - num_bytes:
            raise InvalidRequestError(
                f"must be a multiple of {ALIGNMENT_BYTES} that leaves room for {num_bytes} bytes "
                f"in a region of {self.size_bytes}",
                field=f"{field}.offset_bytes",
            )
        return self._whole[first : first + num_bytes].view(dtype).view(tuple(shape))


def no_region(place: pb.MemoryRange, field: str) -> Region:
    """Raise InvalidRequestError naming ``field``: the caller has no region."""
    raise InvalidRequestError(
        "names shared memory, but no region was agreed with this client: send the elements as data",
        field=field,
    )


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors have bytes in common."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


class HostRegion(Region):
    """A region in main memory, freed once neither process uses it. Every connection has one."""

    id, is_on_device = 1, False

    def __init__(self, size_bytes: int) -> None:
        """Allocate the memory. Raises OSError without memory or file descriptors left."""
        self.fd = os.memfd_create("kvplane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(self.fd, size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        super().__init__(torch.frombuffer(memory, dtype=torch.uint8))

    def close_fd(self) -> None:
        """Close this process's ``fd``, once the client has its own."""
        os.close(self.fd)
