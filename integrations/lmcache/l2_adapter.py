"""An L2 adapter of LMCache's server: objects of its first level in a pool of opaque pages.

    look-up and lock ──► pins ──► load ──► LMCache's memory ──► unlock: the pins are undone
    store ──► pages under names: model, rank, object group, chunk; a namespace for each salt

LMCache's two controller threads submit tasks, wait for an event, and take each result once.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from ..chunks import ChunkCache, ChunkSettings, Found, namespace_of
from ..chunks.cache import load_whole

_LOGGER: Final = logging.getLogger(__name__)
_MAX_LOOKED_UP: Final = 512
"""Objects of one look-up, and of one step that stores."""


@dataclass(eq=False)
class _Lock:
    """A look-up's pins. ``num_keys``: those of its keys that are still locked."""

    found: Found
    num_keys: int


class _Results:
    """Results of tasks of one kind, each handed out once, and the event that tells of them."""

    def __init__(self) -> None:
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._results: dict[int, Any] = {}

    def put(self, task: int, result: Any) -> None:
        with self._lock:
            self._results[task] = result
        os.eventfd_write(self.event, 1)

    def pop(self, task: int) -> Any:
        """Return a task's result; None if it is not done, or was handed out."""
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            results, self._results = self._results, {}
        return results


class KvplaneL2(L2AdapterInterface):  # type: ignore[misc]
    """Keeps objects for LMCache. No method blocks but ``close``, and what fails is a miss. The
    arguments of all methods are those of LMCache's base class.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """Read ``adapter_params``: ``ChunkSettings``; ``weights``, the revision or a hash of the
        weights; ``page_bytes``, the most bytes of an object. Raises ValueError naming what is
        wrong there, and LayoutMismatchError if the pool is of other weights.
        """
        super().__init__()
        given = dict(params)
        weights, page_bytes = given.pop("weights", None), given.pop("page_bytes", None)
        if not (isinstance(weights, str) and weights):
            raise ValueError("weights: must be the revision or a hash of the weights")
        if not isinstance(page_bytes, int):
            raise ValueError("page_bytes: must be the --opaque-page-bytes of the pool")
        self._weights, self._page_bytes = weights, page_bytes
        self._stored, self._looked_up, self._loaded = _Results(), _Results(), _Results()
        self._tasks = itertools.count(1)
        self._mutex = threading.Lock()
        self._locks: defaultdict[Any, list[tuple[_Lock, int]]] = defaultdict(list)
        self._refused: set[tuple[str, int]] = set()
        settings = ChunkSettings.from_mapping(given)
        self._cache = ChunkCache(settings, model_id=f"lmcache/{weights}", page_bytes=page_bytes)
        try:
            self._cache.open()
        except BaseException:
            self.close()
            raise

    def get_store_event_fd(self) -> int:
        return self._stored.event

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._looked_up.event

    def get_load_event_fd(self) -> int:
        return self._loaded.event

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Store objects. The task fails, as a whole, if one is not stored."""
        task = next(self._tasks)
        pages = [_bytes_of(each) for each in objects]
        if not all(map(self._fits, keys, pages)):
            self._stored.put(task, L2StoreResult(False, 0))
            return task
        stores = [
            self._cache.store_named(
                namespace,
                [_name(keys[i]) for i in part],
                [pages[i] for i in part],
                [_format(objects[i]) for i in part],
            )
            for namespace, part in self._parts(keys)
        ]

        def finish(stored: list[list[bool]]) -> None:
            is_whole = all(map(all, stored))
            num_bytes = sum(map(len, pages)) if is_whole else 0
            self._stored.put(task, L2StoreResult(is_whole, num_bytes))

        _when_all_are_done(stores, finish)
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stored.pop_all()

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Any) -> int:
        """Look objects up, and pin those that are cached until they are unlocked."""
        task = next(self._tasks)
        parts = [*self._parts(keys)]

        def finish(all_found: list[Found | None]) -> None:
            hits = Bitmap(len(keys))
            for (_, part), found in zip(parts, all_found, strict=True):
                if found is None:
                    continue
                items = [*_where(found.num_blocks)]
                if not items:
                    self._cache.release(found)
                lock = _Lock(found, len(items))
                with self._mutex:
                    for item in items:
                        self._locks[keys[part[item]]].append((lock, item))
                        hits.set(part[item])
            self._looked_up.put(task, hits)

        _when_all_are_done(
            [
                self._cache.look_up_named(namespace, [_name(keys[i]) for i in part])
                for namespace, part in parts
            ],
            finish,
        )
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._looked_up.pop(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Undo one lock of each key. Pins are undone with the last key of their look-up."""
        for key in keys:
            with self._mutex:
                if not self._locks[key]:
                    del self._locks[key]
                    continue
                lock, _ = self._locks[key].pop(0)
                lock.num_keys -= 1
                if not self._locks[key]:
                    del self._locks[key]
            if lock.num_keys == 0:
                self._cache.release(lock.found)

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Load locked objects into memory. One of another size or format than its memory's is not
        loaded.
        """
        task = next(self._tasks)
        parts: defaultdict[_Lock, list[tuple[int, int]]] = defaultdict(list)
        with self._mutex:
            for i, key in enumerate(keys):
                if key in self._locks and self._fits(key, _bytes_of(objects[i])):
                    lock, item = self._locks[key][-1]
                    parts[lock].append((i, item))

        def finish(loaded: list[list[bool]]) -> None:
            whole = Bitmap(len(keys))
            for part, done in zip(parts.values(), loaded, strict=True):
                for at in _where(done):
                    whole.set(part[at][0])
            self._loaded.put(task, whole)

        _when_all_are_done(
            [
                load_whole(
                    self._cache,
                    lock.found,
                    [item for _, item in part],
                    [_bytes_of(objects[i]) for i, _ in part],
                    [_format(objects[i]) for i, _ in part],
                )
                for lock, part in parts.items()
            ],
            finish,
        )
        return task

    def query_load_result(self, task_id: int) -> Any:
        return self._loaded.pop(task_id)

    def report_status(self) -> dict[str, Any]:
        """Return the counters of ``ChunkCache``. A pool that is away makes nothing unhealthy."""
        return {"is_healthy": True, "type": type(self).__name__, **self._cache.counters}

    def close(self) -> None:
        """End the session, and only then the events, to which what is under way may write."""
        self._cache.close()
        for results in (self._stored, self._looked_up, self._loaded):
            os.close(results.event)

    def _fits(self, key: Any, page: memoryview) -> bool:
        """Return whether a page has room; says once for each object group that it has not."""
        group = (key.model_name, key.object_group_id)
        if len(page) > self._page_bytes and group not in self._refused:
            self._refused.add(group)
            what = f"objects of group {key.object_group_id} of {key.model_name}"
            _LOGGER.error("%s: %d bytes, page_bytes is %d", what, len(page), self._page_bytes)
        return len(page) <= self._page_bytes

    def _parts(self, keys: Sequence[Any]) -> Iterator[tuple[str, list[int]]]:
        """Yield the indices of keys by namespace, so many that a step has room for them."""
        by_salt: defaultdict[str, list[int]] = defaultdict(list)
        for i, key in enumerate(keys):
            by_salt[key.cache_salt].append(i)
        for salt, indices in by_salt.items():
            namespace = namespace_of("lmcache", self._weights, salt)
            for begin in range(0, len(indices), _MAX_LOOKED_UP):
                yield namespace, indices[begin : begin + _MAX_LOOKED_UP]


def _name(key: Any) -> bytes:
    """Return the name of an object, which its salt is no part of."""
    parts = (key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash)
    return hashlib.sha256(repr(parts).encode()).digest()


def _format(memory: Any) -> bytes:
    """Return what an object's bytes mean, as a key that a load compares."""
    meta = memory.meta
    parts = (meta.shapes or [meta.shape], meta.dtypes or [meta.dtype], meta.fmt)
    return hashlib.sha256(repr(parts).encode()).digest()


def _bytes_of(memory: Any) -> memoryview:
    return memoryview(memory.byte_array).cast("B")


def _where(flags: Sequence[Any]) -> Iterator[int]:
    return (i for i, flag in enumerate(flags) if flag)


def _when_all_are_done(futures: Sequence[Future[Any]], then: Callable[[list[Any]], None]) -> None:
    """Call with the results of all futures, in the thread of the last one that is done."""
    left = itertools.count(len(futures) - 1, -1)

    def done(_: Future[Any]) -> None:
        if next(left) == 0:
            then([future.result() for future in futures])

    if not futures:
        then([])
    for future in futures:
        future.add_done_callback(done)
