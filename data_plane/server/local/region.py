"""A memory region that this process made for one client, and the tensors in it.

The client may change any byte at any time. So nothing that is read from a region decides anything:
shapes and places come by messages, and are checked against the size that was allocated here.
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
from kvplane.layout import dtype_from_wire
from kvplane.tensor import MAX_DIMENSIONS
from kvplane.transport.local.packets import ALIGNMENT_BYTES
from kvplane.v1 import types_pb2 as pb

REGION_ID: Final = 1
"""Every connection has one region."""

# The client could else truncate the file, and this process would die of SIGBUS.
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAX_EXTENT: Final = 2**31 - 1


class Region:
    """Main memory, zero at first, that goes when neither process uses it any more."""

    def __init__(self, size_bytes: int) -> None:
        """Raises OSError where the memory or a file descriptor cannot be had."""
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("kvplane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = mmap.mmap(self.fd, size_bytes)
        except BaseException:
            os.close(self.fd)
            raise

    def close_fd(self) -> None:
        """Once the client has its own."""
        os.close(self.fd)

    def tensor(self, message: pb.Tensor, field: str) -> torch.Tensor:
        """The tensor whose elements are in this region; on the CPU, and no copy. Raises
        InvalidRequestError naming the part of ``field``.
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
        """The tensor at ``place``. Raises InvalidRequestError naming the part of ``field``."""
        if place.region_id != REGION_ID:
            raise InvalidRequestError(
                "names a region that was not agreed with this client", field=f"{field}.region_id"
            )
        num_elements = math.prod(shape)
        first, num_bytes = place.offset_bytes, num_elements * dtype.itemsize
        if first % ALIGNMENT_BYTES or not 0 <= first <= self.size_bytes - num_bytes:
            raise InvalidRequestError(
                f"must be a multiple of {ALIGNMENT_BYTES} that leaves room for {num_bytes} bytes "
                f"in a region of {self.size_bytes}",
                field=f"{field}.offset_bytes",
            )
        if num_elements == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=num_elements, offset=first)
        return flat.view(tuple(shape))
