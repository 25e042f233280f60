"""SGLang without SGLang: the classes that a storage backend is made of, and a host pool."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

# Of sglang/srt/mem_cache/hicache_storage.py in release 0.5.23.
HICACHE_STORAGE = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None

class PoolName(str, Enum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    def __str__(self): return self.value

class PoolHitPolicy(str, Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"

@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: object = None
    device_indices: object = None
    keys: list | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES

@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict
    restorable_prefix_pages: list | None = None

class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host): ...
    def register_mem_host_pool_v2(self, host_pool, host_pool_name): ...
    def on_host_pools_registered(self): ...
    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None): ...
    def batch_get_v2(self, transfers, extra_info=None): ...
    def batch_set_v2(self, transfers, extra_info=None): ...
    def batch_get_v1(self, keys, host_indices, extra_info=None): ...
    def batch_set_v1(self, keys, host_indices, extra_info=None): ...
    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...
    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...
    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...
    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...
    @abstractmethod
    def exists(self, key): ...
    def batch_exists(self, keys, extra_info=None): ...
    def clear(self): ...
    def get_stats(self): ...
"""
sglang: Any = ModuleType("sglang.srt.mem_cache.hicache_storage")
sys.modules[sglang.__name__] = sglang
exec(compile(HICACHE_STORAGE, "hicache_storage.py", "exec", dont_inherit=True), sglang.__dict__)
for package in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
    sys.modules.setdefault(package, ModuleType(package))


class HostPool:
    """A host pool of SGLang for heads, ``layer_first``: a page is not contiguous in it."""

    def __init__(self, num_pages: int = 8, page_size: int = 4, head_dim: int = 5) -> None:
        self.page_size, self.layout, self.dtype = page_size, "layer_first", torch.bfloat16
        self.kv = torch.randn(2, 2, num_pages * page_size, 1, head_dim, dtype=self.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv[:, :, index : index + self.page_size].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.kv[:, :, : self.page_size]).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.kv[:, :, index : index + self.page_size]
        page.copy_(data_page.reshape(page.shape))

    def rows(self, *pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(self.page_size) + page * self.page_size for page in pages])

    def page(self, page: int) -> list[float]:
        return self.get_data_page(page * self.page_size).tolist()
