"""Pinned host memory, which a GPU copies to and from asynchronously."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch

from data_plane.memory import huge_pages
from data_plane.memory.sizing import free_bytes
from kvplane.errors import NeverFitsError

_FOR_ALL_GPUS: Final = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped: kernels copy from it


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, field: str
) -> tuple[torch.Tensor, Callable[[], None]]:
    """A pinned tensor like ``torch.empty`` on the CPU for the GPU ``device``, and a function that
    unpins it.

    Torch rounds its own pinned memory up to a power of two, which can be twice what a large tier
    needs. A large tensor is therefore allocated as for the CPU and then registered with the driver.
    Raises NeverFitsError naming ``field`` when there is too little memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    check_fits(num_bytes, field)
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype), lambda: None
    # Otherwise the driver would initialize whichever GPU is current, and use some of its memory.
    with torch.cuda.device(device):
        if num_bytes < huge_pages.HUGE_PAGE_BYTES:
            return torch.empty(shape, dtype=dtype, pin_memory=True), lambda: None
        tensor = huge_pages.empty(shape, dtype)
        address = tensor.data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, num_bytes, _FOR_ALL_GPUS)) != 0:
            _forget_last_error(device)
            raise NeverFitsError(f"{num_bytes} bytes of host memory cannot be pinned", field=field)

    def unpin() -> None:
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(address)

    return tensor, unpin


def _forget_last_error(device: torch.device) -> None:
    """Torch checks the last error after each kernel launch. Launch one for nothing, so that the
    next launch is not blamed for what failed here.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def check_fits(num_bytes: int, field: str) -> None:
    """Raise NeverFitsError for more than the free memory: pinning touches all of it at once, so the
    system would kill the process.
    """
    free = free_bytes(torch.device("cpu"))
    if num_bytes > free:
        raise NeverFitsError(
            f"{num_bytes} bytes do not fit in the {free} that are free", field=field
        )
