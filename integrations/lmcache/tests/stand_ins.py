"""LMCache without LMCache: the classes that an L2 adapter is made of, and objects in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.helpers.stand_ins import stand_in

# Of lmcache/v1/distributed/l2_adapters/base.py, lmcache/v1/distributed/internal_api.py,
# lmcache/v1/distributed/api.py and lmcache/lmcache_native.pyi in release 0.5.6.
BASE = """
from abc import ABC, abstractmethod
class L2AdapterInterface(ABC):
    def __init__(self, max_capacity_bytes=0): ...
    @abstractmethod
    def get_store_event_fd(self): ...
    @abstractmethod
    def get_lookup_and_lock_event_fd(self): ...
    @abstractmethod
    def get_load_event_fd(self): ...
    @abstractmethod
    def submit_store_task(self, keys, objects): ...
    @abstractmethod
    def pop_completed_store_tasks(self): ...
    @abstractmethod
    def submit_lookup_and_lock_task(self, keys, group_layout_descs): ...
    @abstractmethod
    def query_lookup_and_lock_result(self, task_id): ...
    @abstractmethod
    def submit_unlock(self, keys): ...
    @abstractmethod
    def submit_load_task(self, keys, objects): ...
    @abstractmethod
    def query_load_result(self, task_id): ...
    @abstractmethod
    def close(self): ...
    def report_status(self): ...
"""
INTERNAL_API = """
class L2StoreResult(int):
    def __new__(cls, success, bytes_transferred):
        return super().__new__(cls, bytes_transferred if success else -1)
    def is_successful(self): return self >= 0
    def bytes_transferred(self): return max(0, self)
"""
NATIVE = """
class Bitmap:
    def __init__(self, size): self._bits = [False] * size
    def set(self, index): self._bits[index] = True
    def test(self, index): return self._bits[index]
    def __len__(self): return len(self._bits)
"""
stand_in(
    {
        "lmcache.lmcache_native": NATIVE,
        "lmcache.v1.distributed.internal_api": INTERNAL_API,
        "lmcache.v1.distributed.l2_adapters.base": BASE,
    }
)


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "qwen"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass
class Meta:
    shape: tuple[int, ...]
    dtype: str | None = "bfloat16"
    fmt: str = "KV_2LTD"
    shapes: list[Any] | None = None
    dtypes: list[Any] | None = None


@dataclass
class MemoryObj:
    data: bytearray
    meta: Meta = field(default_factory=lambda: Meta((2, 1)))

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.data)
