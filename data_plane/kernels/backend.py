"""The kernels that an executor runs on: one interface, on the CPU or on a GPU.

    CpuKernels     csrc/cpu       a call has finished when it returns
    CudaKernels    csrc/cuda      calls are queued on streams; ``check_faults`` waits for one

Both have the same operations with the same arguments, so their users need not tell them apart.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import torch

from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backends.bound_layers import HostLayers
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.kernels.backends.cuda import CudaKernels, QueuedLayers, StepMemory
from data_plane.kernels.device.cuda_streams import CudaRuntime, DeviceStreams, Streams
from kvplane.errors import InvalidRequestError
from kvplane.layout import OPAQUE, STATE, Layout


class Kernels(Protocol):
    """Interface of the kernels of one backend. ``data_plane.kernels.arguments`` describes pages and
    pools.

    Each operation raises InvalidRequestError, naming the argument, before it writes anything. Ids
    and lengths in GPU memory are checked by the kernels instead: a bad one is never used as an
    address, and ``check_faults`` reports it.
    """

    @property
    def backend(self) -> str:
        """The backend's name in the log and in a metric: "cpu" or "cuda"."""

    @property
    def detail(self) -> str:
        """Details for the log, as ``key=value`` pairs."""

    @property
    def device_uuid(self) -> str:
        """UUID of the kernels' GPU, "GPU-..."; empty for the CPU."""

    @property
    def cache_kinds(self) -> tuple[str, ...]:
        """The cache kinds of layer groups that the kernels serve."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the device that calls need beside the pools and the callers' tensors."""

    @property
    def streams(self) -> Streams:
        """The streams that calls are queued on, and that keep them in order."""

    def reshape_and_cache(self, arguments: WriteArguments) -> None:
        """Write each token's key and value into its slot, rounded to nearest even."""

    def paged_attention(
        self,
        arguments: AttentionArguments,
        *,
        lse: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute causal attention of ragged query tokens over paged KV: decode, prefill and append
        alike.

        Returns [num_tokens, num_heads, value_head_size] of the query's dtype. ``lse``, contiguous
        float32 [num_tokens, num_heads], receives the natural logarithm of the sum of the
        exponentials of the scores, and of the sink where there is one. ``out``, contiguous,
        receives the result; None for new memory. Sums are in fp32. No bit of the result depends on
        the rest of the batch.
        """

    def share_memory(self, num_bytes: int) -> Any:
        """Allocate zeroed GPU memory that another process can open: a native ``SharedMemory``.
        Raises RuntimeError if there is no memory, or none that can be shared.
        """

    def bound_layers(self) -> HostLayers | QueuedLayers | None:
        """Return an object that binds layers for one executor, which then write and attend without
        more checks; None for kernels that bind none.
        """

    def step_memory(self) -> StepMemory | None:
        """Return memory for calls that a CUDA graph can capture; None where there are no graphs."""

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        """Copy whole blocks inside a pool, in order: a pair may read what an earlier one wrote.

        pairs: int64 [num_pairs, 2] on the host, source and destination.
        """

    def swap_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        """Copy whole blocks from one pool to another of the same layout, in order. Either may be on
        the host; pinned memory is faster.

        pairs: int64 [num_pairs, 2] on the host, a block of source and a block of destination.
        """

    def gather_blocks(self, pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Copy blocks out of a pool on the device into the canonical order: layers before blocks.

        block_ids: int64 [num_block_ids] on the host.
        Returns [num_layers, num_block_ids, ...], the pool's shape of a page at the end.
        """

    def scatter_blocks(
        self, pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor
    ) -> None:
        """Copy blocks into a pool, inversely to ``gather_blocks``. Of equal ids the last counts."""

    def clear_blocks(self, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Zero whole blocks of a pool on the device. block_ids: int64 [num_block_ids], on
        the host.
        """

    def check_faults(self) -> None:
        """Wait for the caller's stream. Raises InvalidRequestError for a bad tensor that kernels
        have found since the last call.
        """


def check_cache_kinds(layout: Layout, kernels: Kernels) -> None:
    """Check that ``kernels`` serve each layer group's cache kind. Raises InvalidRequestError."""
    for i, group in enumerate(layout.groups):
        # No kernel computes with opaque pages, or with states.
        if group.cache_kind not in (*kernels.cache_kinds, OPAQUE, STATE):
            raise InvalidRequestError(
                f"must be {' or '.join(kernels.cache_kinds)} for the {kernels.backend} kernels, "
                f"is {group.cache_kind}",
                field=f"layout.groups[{i}].cache_kind",
            )


def cache_kinds_of(device: torch.device) -> tuple[str, ...]:
    """Return the cache kinds that the kernels for ``device`` serve."""
    return (CpuKernels if device.type == "cpu" else CudaKernels).cache_kinds


def kernels_of(device: torch.device, num_threads: int) -> Kernels:
    """Return the kernels for ``device``, as chosen by ``data_plane.kernels.device.devices``.
    ``num_threads``: of the CPU kernels. Raises the same errors as ``CpuKernels`` does.
    """
    if device.type == "cpu":
        return CpuKernels(num_threads)
    streams = DeviceStreams(CudaRuntime(device))
    return CudaKernels(import_module("kvplane_kernels._cuda"), device, streams=streams)
