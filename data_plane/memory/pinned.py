"""Host memory that a GPU copies to and from by itself, while nobody waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch

from data_plane.memory import huge_pages
from data_plane.memory.sizing import free_bytes
from kvplane.errors import NeverFitsError

_FOR_ALL_GPUS: Final = 1  # cudaHostRegisterPortable


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, field: str
) -> tuple[torch.Tensor, Callable[[], None]]:
    """A tensor like ``torch.empty`` on the CPU for the GPU ``device``, and what gives its pinning
    up again.

    Torch's own pinned memory comes in powers of two, which for a large tier can be twice what was
    asked for; a large one is thus taken as for the CPU and then made known to the driver. Raises
    NeverFitsError naming ``field`` when the machine does not have it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    check_fits(num_bytes, field)
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype), lambda: None
    # Else the driver would set up whichever GPU is current, and take some of its memory.
    with torch.cuda.device(device):
        if num_bytes < huge_pages.HUGE_PAGE_BYTES:
            return torch.empty(shape, dtype=dtype, pin_memory=True), lambda: None
        tensor = huge_pages.empty(shape, dtype)
        address = tensor.data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, num_bytes, _FOR_ALL_GPUS)) != 0:
            _forget_last_error(device)
            raise NeverFitsError(f"{num_bytes} bytes of host memory can not be pinned", field=field)

    def unpin() -> None:
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(address)

    return tensor, unpin


def _forget_last_error(device: torch.device) -> None:
    """Torch asks for the last error after each kernel that it starts: the next one would be blamed
    for what failed here, unless one is started for nothing.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def check_fits(num_bytes: int, field: str) -> None:
    """Pinning takes the memory at once: more than there is would end the process."""
    free = free_bytes(torch.device("cpu"))
    if num_bytes > free:
        raise NeverFitsError(
            f"{num_bytes} bytes do not fit in the {free} that are free", field=field
        )
