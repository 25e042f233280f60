"""The machine to measure on: a GPU, or the emulator to test the code of the benchmark."""

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

from benchmarks.gpu.device.timing import Watch
from data_plane.kernels.backends.cuda import CudaKernels

DEFAULT_SPLIT: Final[int] = inspect.signature(CudaKernels).parameters["split_tokens"].default
"""The split of the data plane, to which the targets apply."""
METHOD: Final = (
    "medians, with the L2 cache emptied by reading other memory before each run; of replayed "
    "graphs, except for swaps, links and gather_blocks, which are plain calls and include the "
    "host's time"
)


class NoGpuError(RuntimeError):
    """There is no GPU, or no build for it; the message says what is missing."""


@dataclass
class Machine:
    """A device, its native module and a watch. ``large_bytes``: of buffers for bandwidths."""

    device: torch.device
    native: ModuleType
    watch: Watch
    large_bytes: int = 4 << 30
    _kernels: dict[tuple[int, bool], CudaKernels] = field(default_factory=dict, init=False)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_multiprocessors(self) -> int:
        if not self.is_gpu:
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def kernels(
        self, split_tokens: int = DEFAULT_SPLIT, *, share_reads: bool = True
    ) -> CudaKernels:
        """Return the kernels with these settings, made once for each."""
        settings = split_tokens, share_reads
        if settings not in self._kernels:
            self._kernels[settings] = CudaKernels(
                self.native, self.device, split_tokens=split_tokens, share_reads=share_reads
            )
        return self._kernels[settings]

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0]) if self.is_gpu else 1 << 40

    def tidy(self) -> None:
        """Free unused memory that torch has cached."""
        # After a fault on the device every call fails; earlier rows are kept.
        with suppress(RuntimeError):
            if self.is_gpu:
                torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a host tensor, pinned where there is a GPU."""
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
            about["multiprocessors"] = self.num_multiprocessors
            about["memory_gib"] = round(properties.total_memory / (1 << 30), 1)
        return about


def this_gpu(watch: Watch) -> Machine:
    """Return the first GPU here. Raises NoGpuError where there is none, or no build for it."""
    if not torch.cuda.is_available():
        raise NoGpuError("there is no GPU that torch can use")
    try:
        native = import_module("kvplane_kernels._cuda")
    except ImportError as error:
        wanted = "the kernels are not built with CUDA: use benchmarks/gpu/run.sh"
        raise NoGpuError(f"{wanted} ({error})") from None
    return Machine(torch.device("cuda"), native, watch)
