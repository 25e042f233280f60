"""The kernels on the CPU (csrc/cpu): a call has finished when it returns."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch

from data_plane.kernels.arguments import HOST, AttentionArguments
from data_plane.kernels.backends.bound_layers import HostLayers
from data_plane.kernels.backends.native import NativeKernels
from data_plane.kernels.device.cuda_streams import HostStreams
from kvplane.errors import InvalidRequestError
from kvplane.layout import KEYS_AND_VALUES, LATENT

try:
    import kvplane_kernels
except ImportError as error:
    raise ImportError(
        "the native kernels (kvplane_kernels) are missing: build them with `pip install ./csrc`"
    ) from error

_MAX_THREADS: Final = 1024
_ON_ONE_THREAD: Final = ("gather_blocks", "scatter_blocks")


class CpuKernels(NativeKernels):
    """The kernels on the CPU; ``data_plane.kernels.backend.Kernels`` describes the operations.

    ``num_threads``: 0 for as many as torch uses. No bit of a result depends on it. Raises
    InvalidRequestError for a number out of range, and when KVPLANE_KERNELS_ISA names an instruction
    set that the machine does not have. Of tokens with equal slots the last one counts.
    ``share_reads``: read the blocks that sequences share once for all of them. No bit depends on it
    either; it can be turned off to measure its effect.
    """

    backend = "cpu"
    cache_kinds = (KEYS_AND_VALUES, LATENT)
    scratch_bytes = 0
    device_uuid = ""

    def __init__(self, num_threads: int = 0, *, share_reads: bool = True) -> None:
        super().__init__(kvplane_kernels, HOST)
        if not 0 <= num_threads <= _MAX_THREADS:
            raise InvalidRequestError(
                f"must be from 0 to {_MAX_THREADS}, is {num_threads}", field="num_threads"
            )
        self.num_threads = num_threads
        self._share_reads = share_reads
        self.detail = f"isa={cpu_isa()}"
        self.streams = HostStreams()

    def paged_attention(
        self,
        arguments: AttentionArguments,
        *,
        lse: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Online softmax (Milakov and Gimelshein, 2018) over tiles of 32 tokens.
        return self._attend(arguments, out, lse, share_reads=self._share_reads)

    def share_memory(self, num_bytes: int) -> NoReturn:
        raise RuntimeError("a CPU has no memory of its own")

    def bound_layers(self) -> HostLayers:
        return HostLayers(self._module, self._bound_layer, self._threads)

    def step_memory(self) -> None:
        """Return None, because a CPU has no graphs."""

    def check_faults(self) -> None:
        """Do nothing, because each call checks the values of its arguments and raises."""

    def _call(self, name: str, **arguments: Any) -> Any:
        if name not in _ON_ONE_THREAD:
            arguments["num_threads"] = self._threads()
        return super()._call(name, **arguments)

    def _threads(self) -> int:
        return self.num_threads or torch.get_num_threads()


def cpu_isa() -> str:
    """Return the instruction set in use: avx512bf16, avx512, avx2 or baseline.

    It is the best one of the machine, or the one that KVPLANE_KERNELS_ISA names. Raises
    InvalidRequestError when the machine does not have the one named.
    """
    try:
        return kvplane_kernels.cpu_isa()
    except ValueError as error:
        _, _, wanted = str(error).partition(" must ")
        raise InvalidRequestError(f"must {wanted}", field="KVPLANE_KERNELS_ISA") from None
