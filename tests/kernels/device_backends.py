"""The backends `emulated` and `cuda`, with the interface of ``data_plane.kernels.cpu``.

Tensors come and go on the CPU, as the cases make them; `cuda` moves them there and back.
KVPLANE_DEVICE_BACKEND chooses: `emulated` (the default) needs a C++ compiler, `cuda` a GPU and a
build of csrc with KVPLANE_CUDA=ON.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import kernel_cases
import torch
from emulated_build import emulated_module

from data_plane.kernels.cuda import DeviceKernels
from kvplane.attention_options import AttentionOptions


def chosen_backend(*, split_tokens: int = 64) -> DeviceBackend:
    """The backend that the environment names, its threads in the order of seed 0."""
    name = os.environ.get("KVPLANE_DEVICE_BACKEND", "emulated")
    if name == "cuda":
        native, device = import_module("kvplane_kernels._cuda"), "cuda"
    else:
        assert name == "emulated", name
        native, device = emulated_module(), "cpu"
    backend = DeviceBackend(native, device, split_tokens=split_tokens)
    backend.set_seed(0)
    return backend


class DeviceBackend:
    """``data_plane.kernels.cpu`` on a device: num_threads is ignored, faults are raised."""

    def __init__(self, native: ModuleType, device: str, *, split_tokens: int = 64) -> None:
        self.native = native
        self.device = torch.device(device)
        self.split_tokens = split_tokens
        self.kernels = DeviceKernels(native, self.device, split_tokens=split_tokens)

    def set_seed(self, seed: int) -> None:
        """Chooses the order of the emulator's threads; a GPU takes its own."""
        if self.device.type == "cpu":
            self.native.set_seed(seed)

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        options: AttentionOptions = AttentionOptions(),
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
        num_threads: int = 0,
        return_lse: bool = False,
        max_query_len: int = 0,
    ) -> Any:
        lse = torch.full(query.shape[:2], torch.nan, device=self.device)
        out = self.kernels.paged_attention(
            self._there(query),
            self._there(pages),
            self._there(block_tables),
            self._there(query_starts),
            self._there(context_lens),
            options=options,
            key_scales=self._there_or_none(key_scales),
            value_scales=self._there_or_none(value_scales),
            lse=lse,
            max_query_len=max_query_len,
        )
        self.kernels.check_faults()
        return (out.cpu(), lse.cpu()) if return_lse else out.cpu()

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        *,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> None:
        there = self._there(pages)
        self.kernels.reshape_and_cache(
            self._there(key),
            self._there(value),
            there,
            self._there(slots),
            key_scales=self._there_or_none(key_scales),
            value_scales=self._there_or_none(value_scales),
        )
        self.kernels.check_faults()
        self._back(there, pages)

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        there = self._there(pool)
        self.kernels.copy_blocks(there, pairs)
        self._back(there, pool)

    def swap_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        there = self._there(destination)
        self.kernels.swap_blocks(source, there, pairs)
        self._back(there, destination)

    def gather_blocks(self, pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return self.kernels.gather_blocks(self._there(pool), block_ids).cpu()

    def scatter_blocks(
        self, pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor
    ) -> None:
        there = self._there(pool)
        self.kernels.scatter_blocks(there, block_ids, self._there(blocks))
        self._back(there, pool)

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device, with the same strides."""
        if self.device.type == "cpu":
            return tensor
        if tensor.numel() == 0:
            return tensor.to(self.device)
        room = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        whole = tensor.as_strided((room,), (1,)).to(self.device)
        return whole.as_strided(tensor.shape, tensor.stride())

    def _there_or_none(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else self._there(tensor)

    def _back(self, there: torch.Tensor, tensor: torch.Tensor) -> None:
        if self.device.type != "cpu":
            tensor.copy_(there)


@contextmanager
def in_place_of_the_cpu(backend: DeviceBackend) -> Iterator[DeviceBackend]:
    """Lets the cases of ``kernel_cases`` run on the backend."""
    before = kernel_cases.kernels
    kernel_cases.kernels = backend  # type: ignore[assignment, attr-defined]
    try:
        yield backend
    finally:
        kernel_cases.kernels = before  # type: ignore[attr-defined]
