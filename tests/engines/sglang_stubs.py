"""Stands in for what SGLang needs of CUDA: modules that it imports when it starts, pinned memory,
and the copies between its KV cache and its host memory.

Import this before SGLang, in each of its processes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, Final

import torch

ABSENT: Final = ("IPython", "sgl_kernel", "torchaudio", "torchvision")


class _AnyType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Anything(metaclass=_AnyType):
    """Has all attributes, can be called, and can be a base class."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class _Module(types.ModuleType):
    __version__ = "0.4.10"  # SGLang compares that of sgl_kernel

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


Tensors = list[torch.Tensor]


def copy_rows(
    src_layers: Tensors, dst_layers: Tensors, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy rows of tokens between the KV cache and ``layer_first`` memory, in either direction."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def copy_to_pages(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy rows of all layers, K before V, to ``page_first_direct`` memory."""
    pages, places = dst_indices // page_size, dst_indices % page_size
    num_layers = len(src_ptrs) // 2
    for i, source in enumerate(src_ptrs):
        dst_ptrs[i // num_layers][pages, i % num_layers, places] = source[src_indices]


def copy_from_pages(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy rows of one layer from ``page_first_direct`` memory."""
    pages, places = src_indices // page_size, src_indices % page_size
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        destination[dst_indices] = source[pages, layer_id, places]


sys.meta_path.insert(0, _Finder())

from sglang.srt.mem_cache.pool_host import base, mha  # noqa: E402

mha.transfer_kv_direct = copy_rows
mha.transfer_kv_all_layer_direct_lf_pf = copy_to_pages
mha.transfer_kv_per_layer_direct_pf_lf = copy_from_pages
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
base.HostKVCache.pin_memory = property(lambda _: False, lambda *_: None)
