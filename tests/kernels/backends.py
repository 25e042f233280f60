"""The backends that the cases of ``kernel_cases`` run on: each instruction set of the CPU, and the
CUDA kernels, `emulated` or `cuda`.

Arguments and results are on the CPU, as the cases make them; `cuda` moves them there and back.
KVPLANE_DEVICE_BACKEND chooses: `emulated` (the default) needs a C++ compiler, `cuda` a GPU and a
build of csrc with KVPLANE_CUDA=ON. With `cuda` no test runs on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import import_module
from types import ModuleType
from typing import Any, Final, TypeVar

import kernel_cases
import kvplane_kernels
import torch
from emulated_build import emulated_module

from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backend import Kernels
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.kernels.backends.cuda import CudaKernels
from data_plane.memory.pages import Pages

Arguments = TypeVar("Arguments", AttentionArguments, WriteArguments)

DEVICE: Final = os.environ.get("KVPLANE_DEVICE_BACKEND", "emulated")
CPUS: Final = () if DEVICE == "cuda" else tuple(kvplane_kernels.cpu_isas())
ALL: Final = (*CPUS, DEVICE)
ONE_OF_EACH: Final = (*CPUS[:1], DEVICE)


@contextmanager
def used(name: str) -> Iterator[Kernels]:
    """Run the cases of ``kernel_cases`` on the backend of this name."""
    if name == DEVICE:
        with in_place_of_the_cpu(chosen_backend()) as backend:
            yield backend  # type: ignore[misc]
        return
    before = kvplane_kernels.cpu_isa()
    kvplane_kernels.use_cpu_isa(name)
    try:
        yield CpuKernels()
    finally:
        kvplane_kernels.use_cpu_isa(before)


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
    """``Kernels`` of a device for tensors on the CPU; faults are raised at once."""

    def __init__(self, native: ModuleType, device: str, *, split_tokens: int = 64) -> None:
        self.native = native
        self.torch_device = torch.device(device)
        self.split_tokens = split_tokens
        self.kernels = CudaKernels(native, self.torch_device, split_tokens=split_tokens)

    def set_seed(self, seed: int) -> None:
        """Chooses the order of the emulator's threads; a GPU takes its own."""
        if self.torch_device.type == "cpu":
            self.native.set_seed(seed)

    def paged_attention(
        self, arguments: AttentionArguments, *, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        there = torch.full(arguments.query.shape[:2], torch.nan, device=self.torch_device)
        out = self.kernels.paged_attention(self._all_there(arguments), lse=there)
        self.check_faults()
        if lse is not None:
            lse.copy_(there)
        return out.cpu()

    def reshape_and_cache(self, arguments: WriteArguments) -> None:
        there = self._all_there(arguments)
        self.kernels.reshape_and_cache(there)
        self.check_faults()
        self._back(there.pages, arguments.pages)

    def check_faults(self) -> None:
        self.kernels.check_faults()

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
        if self.torch_device.type == "cpu":
            return tensor
        if tensor.numel() == 0:
            return tensor.to(self.torch_device)
        room = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        whole = tensor.as_strided((room,), (1,)).to(self.torch_device)
        return whole.as_strided(tensor.shape, tensor.stride())

    def _pages_there(self, pages: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Keys and values on the device, as far apart as they are here."""
        if self.torch_device.type == "cpu":
            return pages
        first = pages[0]
        whole = first.new_empty(0).set_(first.untyped_storage()).to(self.torch_device)
        return tuple(whole.as_strided(p.shape, p.stride(), p.storage_offset()) for p in pages)

    def _all_there(self, arguments: Arguments) -> Arguments:
        there: dict[str, Any] = {
            f.name: self._there(getattr(arguments, f.name))
            for f in fields(arguments)
            if f.init and isinstance(getattr(arguments, f.name), torch.Tensor)
        }
        if isinstance(arguments.pages, tuple):
            there["pages"] = self._pages_there(arguments.pages)
        return replace(arguments, **there)

    def _back(self, there: Pages, here: Pages) -> None:
        """Both are a tensor, or both are keys and values."""
        if self.torch_device.type == "cpu":
            return
        if isinstance(there, torch.Tensor) and isinstance(here, torch.Tensor):
            there, here = (there, there), (here, here)
        for of_device, of_host in zip(there, here, strict=True):
            of_host.copy_(of_device)


@contextmanager
def in_place_of_the_cpu(backend: DeviceBackend) -> Iterator[DeviceBackend]:
    """Lets the cases of ``kernel_cases`` run on the backend."""
    before = kernel_cases.make_kernels
    kernel_cases.make_kernels = lambda _: backend  # type: ignore[assignment, return-value]
    try:
        yield backend
    finally:
        kernel_cases.make_kernels = before
