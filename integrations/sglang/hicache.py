"""A backend of SGLang's HiCache storage: pages of its host pools in a pool of opaque pages.

    SGLang's host pool ──► name: its key, whose bytes, which host pool ──► ChunkCache ──► kvplane

SGLang hashes tokens, salt and adapter into its keys, but neither the weights nor the format of the
bytes; these are in the names here, and in the pool's ``model_id``.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from kvplane.layout import MAX_PAGE_BYTES

from ..chunks import ChunkCache, ChunkSettings, namespace_of
from ..chunks.cache import load_whole

_LOGGER: Final = logging.getLogger(__name__)
_MAX_LOOKED_UP: Final = 128
"""Pages of one look-up: as many as SGLang asks for in most calls."""
_PAGE_MULTIPLE: Final = 64  # bytes, as of ``--opaque-page-bytes``

Keys = Sequence[str]


class _HostPool(NamedTuple):
    """A host pool of SGLang, the bytes of its pages, and what their names begin with."""

    memory: Any
    page_bytes: int
    identity: bytes


class KvplaneHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps pages for SGLang. Calls block for the time-outs of ``ChunkSettings`` at most, and what
    fails is a miss. The arguments of all methods are those of SGLang's base class.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Read the object ``kvplane`` of the extra config: ``ChunkSettings``, and ``weights``, the
        revision or a hash of the weights. Raises ValueError naming what is wrong there.
        """
        given = dict((storage_config.extra_config or {}).get("kvplane") or {})
        self._weights = given.pop("weights", None)
        if not (isinstance(self._weights, str) and self._weights):
            raise ValueError("kvplane.weights: must be the revision or a hash of the weights")
        self._settings = ChunkSettings.from_mapping(given)
        self._config = storage_config
        self._namespace = namespace_of("sglang", storage_config.model_name, self._weights)
        self._pools: dict[str, _HostPool] = {}
        self._cache: ChunkCache  # from when all host pools are known: no page moves before
        self._max_page_bytes = MAX_PAGE_BYTES

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        self._register(host_pool_name, host_pool)

    def on_host_pools_registered(self) -> None:
        """Open the pool, whose pages have room for the largest page of all host pools. Raises
        LayoutMismatchError if it is of another model or format.
        """
        largest = max(pool.page_bytes for pool in self._pools.values())
        page_bytes = -(-largest // _PAGE_MULTIPLE) * _PAGE_MULTIPLE
        self._max_page_bytes = page_bytes
        model_id = self._model_id(self._pools[PoolName.KV].memory)
        _LOGGER.info("data plane: --opaque-page-bytes %d --model-id '%s'", page_bytes, model_id)
        self._cache = ChunkCache(self._settings, model_id=model_id, page_bytes=page_bytes)
        self._cache.open()

    def batch_exists(self, keys: Keys, extra_info: Any = None) -> int:
        """Return how many leading pages are cached."""
        return _num_leading(self._cached(PoolName.KV, keys, only_leading=True))

    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return which prefixes of the pages can be restored, with what each pool has to have for
        them: all pages, or those of a window at the end. Other policies never limit a prefix.
        """
        num_pages = self.batch_exists(keys)
        num_hits = {PoolName.KV: num_pages} if num_pages else {}
        restorable = [*range(1, num_pages + 1)]
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                width = num_pages
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                width = max(1, len(transfer.keys or ()))
            else:
                continue
            cached = self._cached(transfer.name, keys[:num_pages])
            ends = {i for i in range(1, num_pages + 1) if all(cached[max(0, i - width) : i])}
            if ends:
                num_hits[transfer.name] = max(ends)
            restorable = [end for end in restorable if end in ends]
        return PoolTransferResult(restorable[-1] if restorable else 0, num_hits, restorable)

    def batch_get_v1(self, keys: Keys, host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: Keys, host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._set(PoolName.KV, keys, host_indices)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._get(each.name, each.keys, each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._set(each.name, each.keys, each.host_indices) for each in transfers}

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: Keys, target_locations: Any = None, target_sizes: Any = None) -> Any:
        loaded = self._load(PoolName.KV, keys, target_locations)
        return [room if done else None for room, done in zip(target_locations, loaded, strict=True)]

    def set(self, key: str, value: Any = None, *targets: Any, **named_targets: Any) -> bool:
        return self.batch_set([key], [value])

    def batch_set(self, keys: Keys, values: Any = None, *targets: Any, **named: Any) -> bool:
        return all(self._store(PoolName.KV, keys, values))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Refuse, since other engines use the pool. SGLang answers that it failed."""
        raise NotImplementedError("the pool may be shared: use kvplane forget")

    def close(self) -> None:
        """End the session. SGLang has stopped the threads that call."""
        self._cache.close()

    def _register(self, name: str, memory: Any) -> None:
        if not hasattr(memory, "get_dummy_flat_data_page"):
            raise ValueError(f"host pool {name}: has no pages of bytes")
        page_bytes = memory.get_dummy_flat_data_page().nbytes
        if page_bytes > self._max_page_bytes:
            limit = f"at most {self._max_page_bytes} bytes"
            raise ValueError(f"host pool {name}: pages must have {limit}, have {page_bytes}")
        config = self._config
        ranks = [config.pp_rank, config.attn_cp_rank, config.dcp_rank]
        # Ranks have the same latents, but heads and a model's state of their own.
        if not config.is_mla_model or name == PoolName.MAMBA:
            ranks.append(config.tp_rank)
        identity = (self._model_id(memory), str(name), page_bytes, ranks)
        self._pools[name] = _HostPool(memory, page_bytes, repr(identity).encode())

    def _model_id(self, memory: Any) -> str:
        """Return whose bytes a host pool's pages are. All ranks of an engine say the same."""
        config = self._config
        dtype = str(memory.dtype).removeprefix("torch.")
        sizes = f"tp{config.tp_size}pp{config.pp_size}cp{config.attn_cp_size}dcp{config.dcp_size}"
        whose = f"sglang/{config.model_name}/{self._weights}/{dtype}/{memory.layout}"
        return f"{whose}/page{memory.page_size}/{sizes}{'mla' * config.is_mla_model}"

    def _names(self, pool: str, keys: Keys) -> list[bytes]:
        identity = self._pools[pool].identity
        return [hashlib.sha256(identity + key.encode()).digest() for key in keys]

    def _cached(
        self, pool: str, keys: Keys, *, only_leading: bool = False, to_load: bool = True
    ) -> list[bool]:
        """Return whether each page is cached. ``only_leading``: ask for none after a miss.
        ``to_load``: as of ``ChunkCache.look_up_named``.
        """
        cached: list[bool] = []
        for begin in range(0, len(keys), _MAX_LOOKED_UP):
            names = self._names(pool, keys[begin : begin + _MAX_LOOKED_UP])
            looking = self._cache.look_up_named(self._namespace, names, to_load=to_load)
            if (found := looking.result()) is None:
                break
            self._cache.release(found)
            cached += map(bool, found.num_blocks)
            if only_leading and not all(cached):
                break
        return cached + [False] * (len(keys) - len(cached))

    def _load(self, pool: str, keys: Keys, rooms: Sequence[Any]) -> list[bool]:
        """Load pages into tensors, up to the first that is not cached."""
        names = self._names(pool, keys)
        found = self._cache.look_up_named(self._namespace, names).result()
        if found is None:
            return [False] * len(keys)
        num_found = _num_leading(map(bool, found.num_blocks))
        into = [_bytes_of(room) for room in rooms[:num_found]]
        items = range(num_found)
        loaded = load_whole(self._cache, found, items, into, names[:num_found]).result()
        self._cache.release(found)
        return loaded + [False] * (len(keys) - num_found)

    def _store(self, pool: str, keys: Keys, pages: Sequence[Any]) -> list[bool]:
        """Store the pages that are not cached. Returns whether each is cached now."""
        cached = self._cached(pool, keys, to_load=False)
        missing = [i for i, is_cached in enumerate(cached) if not is_cached]
        names = self._names(pool, [keys[i] for i in missing])
        flat = [pages[i].contiguous() for i in missing]  # lives until all is stored
        stored = self._cache.store_named(self._namespace, names, [*map(_bytes_of, flat)]).result()
        for i, is_stored in zip(missing, stored, strict=True):
            cached[i] = is_stored
        return cached

    def _get(self, pool: str, keys: Keys | None, indices: Any) -> list[bool]:
        memory, keys = self._pools[pool].memory, keys or ()
        rows = _first_rows(memory, indices)
        if len(rows) != len(keys):
            return [False] * len(keys)
        rooms = [memory.get_dummy_flat_data_page() for _ in rows]
        loaded = self._load(pool, keys, rooms)
        for row, room, done in zip(rows, rooms, loaded, strict=True):
            if done:
                memory.set_from_flat_data_page(row, room)
        return loaded

    def _set(self, pool: str, keys: Keys | None, indices: Any) -> list[bool]:
        memory, keys = self._pools[pool].memory, keys or ()
        rows = _first_rows(memory, indices)
        if len(rows) != len(keys):
            return [False] * len(keys)
        return self._store(pool, keys, [memory.get_data_page(row) for row in rows])


def _first_rows(memory: Any, indices: Any) -> list[int]:
    """Return where pages begin in a host pool. ``indices``: a tensor of all rows of each page."""
    return [] if indices is None else [int(row) for row in indices.tolist()[:: memory.page_size]]


def _num_leading(flags: Any) -> int:
    return [*flags, False].index(False)


def _bytes_of(page: Any) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, which has to outlive them."""
    return memoryview((ctypes.c_ubyte * page.nbytes).from_address(page.data_ptr())).cast("B")
