"""The kernels that an executor runs on, and the streams that keep their calls in order.

    cpu_kernels    csrc/cpu       every call is done when it returns
    cuda_kernels   csrc/cuda      calls are put on streams; ``check_faults`` waits for the caller's

Both have the same operations with the same arguments, so that nothing above knows which it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch

from data_plane.kernels import cpu as kernels
from data_plane.kernels.cuda import DeviceKernels
from data_plane.kernels.cuda_streams import CudaRuntime, DeviceStreams, HostStreams, Streams
from kvplane.attention_options import AttentionOptions


class ReshapeAndCache(Protocol):
    """Writes keys and values into slots."""

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        *,
        key_scales: torch.Tensor | None,
        value_scales: torch.Tensor | None,
    ) -> None: ...


class PagedAttention(Protocol):
    """Attends. ``max_query_len``: of the rows, the most tokens that one has."""

    def __call__(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        options: AttentionOptions,
        key_scales: torch.Tensor | None,
        value_scales: torch.Tensor | None,
        max_query_len: int,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One backend. ``data_plane.kernels.cpu`` says what the operations mean."""

    backend: str
    """Its name, in the log and in a metric: "cpu" or "cuda"."""
    detail: str
    """What more the log says of it."""
    streams: Streams
    reshape_and_cache: ReshapeAndCache
    paged_attention: PagedAttention
    copy_blocks: Callable[[torch.Tensor, torch.Tensor], None]
    swap_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    gather_blocks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Of the device tier."""
    gather_host_blocks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    check_faults: Callable[[], None]
    """Raises InvalidRequestError for what kernels found wrong only while they ran."""


def kernels_of(device: torch.device, num_threads: int) -> KernelSet:
    """The kernels that compute on ``device``. ``num_threads``: of the CPU's."""
    return cpu_kernels(num_threads) if device.type == "cpu" else cuda_kernels(device)


def cpu_kernels(num_threads: int = 0) -> KernelSet:
    """Those of ``data_plane.kernels.cpu``. ``num_threads``: 0 for as many as torch uses.

    Raises InvalidRequestError when KVPLANE_KERNELS_ISA names what the machine does not have.
    """

    def paged_attention(*batch: torch.Tensor, max_query_len: int, **options: Any) -> torch.Tensor:
        output: torch.Tensor = kernels.paged_attention(*batch, num_threads=num_threads, **options)
        return output

    return KernelSet(
        backend="cpu",
        detail=f"isa={kernels.cpu_isa()}",
        streams=HostStreams(),
        reshape_and_cache=partial(kernels.reshape_and_cache, num_threads=num_threads),
        paged_attention=paged_attention,
        copy_blocks=partial(kernels.copy_blocks, num_threads=num_threads),
        swap_blocks=partial(kernels.swap_blocks, num_threads=num_threads),
        gather_blocks=kernels.gather_blocks,
        gather_host_blocks=kernels.gather_blocks,
        check_faults=lambda: None,
    )


def cuda_kernels(device: torch.device) -> KernelSet:
    """Those of csrc/cuda on ``device``, which ``data_plane.kernels.devices`` found to be one."""
    gpu = torch.cuda.get_device_properties(device)
    return device_kernel_set(
        DeviceKernels(import_module("kvplane_kernels._cuda"), device),
        backend="cuda",
        detail=f'device="{gpu.name}" arch=sm_{gpu.major}{gpu.minor}',
        streams=DeviceStreams(CudaRuntime(device)),
    )


def device_kernel_set(
    device_kernels: DeviceKernels, *, backend: str, detail: str, streams: Streams
) -> KernelSet:
    """A device's kernels as a set; blocks of the host tier are read by the CPU's."""
    return KernelSet(
        backend=backend,
        detail=detail,
        streams=streams,
        reshape_and_cache=device_kernels.reshape_and_cache,
        paged_attention=device_kernels.paged_attention,
        copy_blocks=device_kernels.copy_blocks,
        swap_blocks=device_kernels.swap_blocks,
        gather_blocks=device_kernels.gather_blocks,
        gather_host_blocks=kernels.gather_blocks,
        check_faults=device_kernels.check_faults,
    )
