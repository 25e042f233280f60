"""What measurements run on: a GPU, or the emulator where only the code is to be tried."""

from __future__ import annotations

import inspect
import platform
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

from benchmarks.gpu.timing import Watch
from data_plane.kernels.cuda import CudaKernels

DEFAULT_SPLIT: Final[int] = inspect.signature(CudaKernels).parameters["split_tokens"].default
"""What the data plane takes, and so what targets are held against."""
METHOD: Final = (
    "medians, the L2 cache filled by reading before each run; of replayed graphs, but swaps, links "
    "and gather_blocks of plain calls, in which the host's share is counted"
)


class NoGpuError(RuntimeError):
    """Says what is missing."""


@dataclass
class Machine:
    """A device with a native module and a watch. ``large_bytes``: what bandwidth is measured on."""

    device: torch.device
    native: ModuleType
    watch: Watch
    large_bytes: int = 4 << 30
    _kernels: dict[int, CudaKernels] = field(default_factory=dict, init=False)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def kernels(self, split_tokens: int = DEFAULT_SPLIT) -> CudaKernels:
        """Made once for each ``split_tokens``."""
        if split_tokens not in self._kernels:
            self._kernels[split_tokens] = CudaKernels(
                self.native, self.device, split_tokens=split_tokens
            )
        return self._kernels[split_tokens]

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0]) if self.is_gpu else 1 << 40

    def tidy(self) -> None:
        """Gives back memory that nothing uses."""
        # After a fault on the device every call fails; what was measured before is kept.
        with suppress(RuntimeError):
            if self.is_gpu:
                torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host, pinned where there is a GPU."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.is_gpu)

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name() if self.is_gpu else "emulated",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
            "split_tokens": DEFAULT_SPLIT,
            "method": METHOD,
        }
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            about["multiprocessors"] = properties.multi_processor_count
            about["memory_gib"] = round(properties.total_memory / (1 << 30), 1)
        return about


def this_gpu(watch: Watch) -> Machine:
    """The first GPU here. Raises NoGpuError where there is none, or no build for it."""
    if not torch.cuda.is_available():
        raise NoGpuError("no GPU that torch can use here")
    try:
        native = import_module("kvplane_kernels._cuda")
    except ImportError as error:
        wanted = "a build of csrc with KVPLANE_CUDA=ON, as benchmarks/gpu/run.sh makes one"
        raise NoGpuError(f"{wanted}, is missing: {error}") from None
    return Machine(torch.device("cuda"), native, watch)
