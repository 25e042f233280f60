"""SGLang without SGLang: the classes that a storage backend is made of, and a host pool."""

from __future__ import annotations

import torch

from tests.helpers.stand_ins import stand_in

# Of sglang/srt/mem_cache/hicache_storage.py in release 0.5.23.
HICACHE_STORAGE = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

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
stand_in({"sglang.srt.mem_cache.hicache_storage": HICACHE_STORAGE})


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
