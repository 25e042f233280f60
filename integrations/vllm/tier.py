"""vLLM's tier below main memory: a kvplane pool, in which a chunk of vLLM is a block.

A request is looked up once, and loads what that found. Where the connector tells the tokens, blocks
are found by these; otherwise each has a name, which is vLLM's key.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Final, TypeAlias

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvplane.errors import LayoutMismatchError
from kvplane.layout import BLOCK_SIZES

from ..chunks import ChunkCache, ChunkSettings, Found
from .identity import REQUEST, WEIGHTS, Heard, model_id_of, namespace_for

_LOGGER: Final = logging.getLogger(__name__)
_KEY_BYTES: Final = 36  # of a SHA-256 and a group; other hashes are neither exact nor reproducible
_NAME_TOKENS: Final = 16  # of a block that is found by its name
_HEAL_S: Final = 60.0
"""How long requests are asked for all of their chunks, after one whose beginning was gone."""
_MAX_ANNOUNCED: Final = 1 << 17

_Parts: TypeAlias = list[tuple[Future[Any], list[bytes]]]
"""Parts of a job with their keys. A part's result says how each of them went."""


@dataclass(eq=False)
class _Asked:
    """Keeps what is known of a request. ``heard``: None where its chunks are found by name.

    ``places``: of each key that was looked up, the look-up, its item there, and the block of it.
    ``unasked``: keys for the next look-up. ``failed``: keys that could not be loaded, which stay
    misses: vLLM would ask for them for ever. ``is_over``: it has loaded what it could.
    """

    heard: Heard | None
    look_ups: list[Future[Found | None]] = field(default_factory=list)
    places: dict[bytes, tuple[Future[Found | None], int, int]] = field(default_factory=dict)
    unasked: list[bytes] = field(default_factory=list)
    failed: set[bytes] = field(default_factory=set)
    is_over: bool = False


@dataclass(eq=False)
class _Job:
    """A job of vLLM, in parts."""

    job: Any
    parts: _Parts
    begun_s: float = field(default_factory=time.monotonic)

    def is_done(self) -> bool:
        return all(part.done() for part, _ in self.parts)

    def wait(self) -> None:
        for part, _ in self.parts:
            part.result()


class KvplaneTier(SecondaryTierManager):
    """A secondary tier of vLLM's ``TieringOffloadingSpec``: chunks in a kvplane pool.

    The options in vLLM's JSON are those of ``ChunkSettings``, and ``weight_version``: a name for
    the weights where the model's name and revision do not tell them, as of a local folder. Raises
    ValueError for others, and LayoutMismatchError where the pool is another engine's.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        weight_version: str = "",
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        weights = WEIGHTS.get()
        if weights is None and not weight_version:
            raise ValueError(
                "weight_version: is needed where the connector is not KvplaneConnector, as vLLM"
                " tells a tier neither the revision nor the quantization of the model"
            )
        sizes = offloading_spec.tokens_per_block
        chunk_tokens = sizes[0] * offloading_spec.blocks_per_chunk
        self._by_tokens = weights is not None and len(sizes) == 1 and chunk_tokens in BLOCK_SIZES
        self._chunk_tokens = chunk_tokens if self._by_tokens else _NAME_TOKENS
        self._weight_version = weight_version
        self._has_events = offloading_spec.kv_events_config.enable_kv_cache_events
        self._bytes = primary_kv_view.cast("B")
        self._requests: dict[str, _Asked] = {}
        self._jobs: list[_Job] = []
        self._events: list[OffloadingEvent] = []
        self._announced: dict[bytes, None] = {}
        self._heals_until_s = 0.0
        self._cache = ChunkCache(
            ChunkSettings.from_mapping(options),
            model_id=model_id_of(offloading_spec.config, weights, self._block_size_bytes),
            page_bytes=self._block_size_bytes,
            block_tokens=self._chunk_tokens,
        )
        layout = shlex.quote(json.dumps(asdict(self._cache.layout)))
        # Of no level below warning: vLLM shows those of its own loggers alone.
        _LOGGER.warning("this engine's pool: kvplane data --layout <(echo %s)", layout)
        try:
            self._cache.open()
        except LayoutMismatchError:
            self._cache.close()
            raise

    # Requests

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        heard = REQUEST.get()
        if (heard is None and not self._by_tokens) or (heard is not None and heard.is_exact):
            self._requests[req_context.req_id] = _Asked(heard if self._by_tokens else None)
        is_healing = time.monotonic() < self._heals_until_s
        policy = OffloadPolicy.REQUEST_LEVEL if is_healing else OffloadPolicy.CHUNK_LEVEL
        return RequestOffloadingContext(policy=policy)

    def on_request_finished(self, req_context: Any) -> None:
        asked = self._requests.pop(req_context.req_id, None)
        if asked is not None:
            self._let_go(asked)

    def on_schedule_end(self, context: Any) -> None:
        for asked in self._requests.values():
            if asked.unasked:
                self._look_up_names(asked)
        for req_id in context.new_req_ids:  # they have loaded what they could
            if (begun := self._requests.get(req_id)) is not None:
                self._let_go(begun)

    def _let_go(self, asked: _Asked) -> None:
        """Release what is held for a request. Its chunks are misses from now on."""
        look_ups, asked.look_ups = asked.look_ups, []
        for look_up in look_ups:
            look_up.add_done_callback(self._release)
        asked.unasked.clear()
        asked.is_over = True

    def _release(self, look_up: Future[Found | None]) -> None:
        found = look_up.result()
        if found is not None:
            self._cache.release(found)

    # Look-ups

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        asked = self._requests.get(req_context.req_id)
        if asked is None or asked.is_over or key in asked.failed:
            return LookupResult.MISS
        place = asked.places.get(key)
        if place is None:
            return self._begin_look_up(asked, key, req_context)
        look_up, item, block = place
        if not look_up.done():
            return LookupResult.RETRY
        found = look_up.result()
        if found is not None and block < found.num_blocks[item]:
            return LookupResult.HIT
        self._gone([key])
        return LookupResult.MISS

    def _begin_look_up(self, asked: _Asked, key: bytes, context: Any) -> LookupResult:
        """Look the request up, or keep a name for a look-up of all that this step asks for."""
        if asked.heard is None:
            if len(key) != _KEY_BYTES:
                return LookupResult.MISS
            if key not in asked.unasked:
                asked.unasked.append(key)
            return LookupResult.RETRY
        block = self._block_of(key, context)
        if block is None:
            return LookupResult.MISS
        if not asked.look_ups:
            size, num_tokens = self._chunk_tokens, asked.heard.request.num_prompt_tokens
            column = asked.heard.column(num_tokens - num_tokens % size, size)
            if not column:
                return LookupResult.MISS
            asked.look_ups.append(self._cache.look_up(self._namespace(asked), [column]))
        asked.places[key] = asked.look_ups[0], 0, block
        return self.lookup(key, context)

    def _look_up_names(self, asked: _Asked) -> None:
        names, asked.unasked = asked.unasked, []
        look_up = self._cache.look_up_named(self._namespace(asked), names)
        asked.look_ups.append(look_up)
        asked.places.update((name, (look_up, item, 0)) for item, name in enumerate(names))

    def _block_of(self, key: bytes, context: Any) -> int | None:
        """Return the index of a key's block in its prompt; None for an unfinished one."""
        end = context.get_offload_key_position(key)
        return None if not end or end % self._chunk_tokens else end // self._chunk_tokens - 1

    def _namespace(self, asked: _Asked) -> str:
        return namespace_for(asked.heard, self._weight_version)

    # Jobs

    def submit_load(self, job_metadata: Any) -> None:
        self._begin(job_metadata, self._load)

    def submit_store(self, job_metadata: Any) -> None:
        self._begin(job_metadata, self._store)

    def _begin(
        self, job: Any, begin: Callable[[_Asked, dict[bytes, memoryview], Any], _Parts]
    ) -> None:
        """Begin a job with the rows of main memory that it reads or writes, by key."""
        asked = self._requests.get(job.req_context.req_id)
        size = self._block_size_bytes
        rows = [self._bytes[int(row) * size : (int(row) + 1) * size] for row in job.chunk_ids]
        pages = dict(zip(job.keys, rows, strict=True))
        parts = [] if asked is None else begin(asked, pages, job.req_context)
        self._jobs.append(_Job(job, parts))

    def _load(self, asked: _Asked, pages: dict[bytes, memoryview], _: Any) -> _Parts:
        by_look_up: dict[Future[Found | None], list[bytes]] = {}
        for key in pages:
            by_look_up.setdefault(asked.places[key][0], []).append(key)
        parts: _Parts = []
        for look_up, keys in by_look_up.items():
            if (found := look_up.result()) is None:
                continue
            places = [asked.places[key][1:] for key in keys]
            into = [pages[key] for key in keys]
            part = self._cache.load(found, places, into, self._compared(keys))
            parts.append((part, keys))
        return parts

    def _store(self, asked: _Asked, pages: dict[bytes, memoryview], context: Any) -> _Parts:
        if asked.heard is not None:
            return self._store_tokens(asked, asked.heard, pages, context)
        names = [key for key in pages if len(key) == _KEY_BYTES]
        given = [pages[name] for name in names]
        return [(self._cache.store_named(self._namespace(asked), names, given), names)]

    def _store_tokens(
        self, asked: _Asked, heard: Heard, pages: dict[bytes, memoryview], context: Any
    ) -> _Parts:
        """Store each run of blocks that follow each other."""
        blocks = {self._block_of(key, context): key for key in pages}
        ordered = sorted(block for block in blocks if block is not None)
        parts: _Parts = []
        for _, numbered in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
            run = [block for _, block in numbered]
            column = heard.column((run[-1] + 1) * self._chunk_tokens, self._chunk_tokens)
            if column is None:
                continue
            keys = [blocks[block] for block in run]
            stored = self._cache.store(
                self._namespace(asked),
                column,
                run[0],
                [pages[key] for key in keys],
                self._compared(keys),
            )
            if run[0] > 0:
                stored.add_done_callback(self._heal)
            parts.append((stored, keys))
        return parts

    def _heal(self, stored: Future[list[bool]]) -> None:
        """Have vLLM offer whole requests for a while: what comes before this run is gone, as after
        a restart of the data plane, and vLLM would not offer it again by itself.
        """
        if not all(stored.result()):
            self._heals_until_s = time.monotonic() + _HEAL_S

    def _compared(self, keys: list[bytes]) -> Sequence[bytes]:
        """Return the keys that a reader compares: none where other processes have others."""
        return keys if all(len(key) == _KEY_BYTES for key in keys) else ()

    def has_pending_work(self) -> bool:
        return bool(self._jobs) or any(asked.unasked for asked in self._requests.values())

    def get_finished_jobs(self) -> list[JobResult]:
        done = [job for job in self._jobs if job.is_done()]
        self._jobs = [job for job in self._jobs if job not in done]
        return [self._finish(job) for job in done]

    def _finish(self, each: _Job) -> JobResult:
        job, is_load = each.job, each.job.is_promotion
        wanted = self._block_size_bytes if is_load else True
        succeeded = [
            key
            for part, keys in each.parts
            for key, result in zip(keys, part.result(), strict=True)
            if result == wanted
        ]
        failed = set(job.keys).difference(succeeded)
        if is_load and failed:
            if (asked := self._requests.get(job.req_context.req_id)) is not None:
                asked.failed |= failed
            self._gone(failed)
        elif not is_load:
            self._announce(succeeded)
        return JobResult(
            job.job_id,
            not failed,
            successful_keys=succeeded if is_load else None,
            transfer_time=time.monotonic() - each.begun_s,
            transfer_bytes=len(succeeded) * self._block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Wait for all jobs, as vLLM does when its caches are reset. The weights may be others
        afterwards, so what is cached is then found by nobody until an engine starts with a
        ``weight_version`` that says so.
        """
        for job in self._jobs:
            job.wait()
        self._weight_version = uuid.uuid4().hex
        for asked in self._requests.values():
            self._let_go(asked)

    # Events

    def _announce(self, keys: list[bytes]) -> None:
        if self._has_events and keys:
            self._announced.update(dict.fromkeys(keys))
            self._events.append(self._event(keys, removed=False))
            self._gone(list(self._announced)[: max(0, len(self._announced) - _MAX_ANNOUNCED)])

    def _gone(self, keys: Collection[bytes]) -> None:
        """Tell of chunks that this engine stored and that are no longer there."""
        gone = [key for key in keys if key in self._announced]
        if gone:
            for key in gone:
                del self._announced[key]
            self._events.append(self._event(gone, removed=True))

    def _event(self, keys: list[bytes], *, removed: bool) -> OffloadingEvent:
        return OffloadingEvent(
            keys=keys, medium=self.medium, removed=removed, locality=self.locality
        )

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    # The tier

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the names in ``config_info``, which vLLM asks for since 0.33."""
        return ("kvplane_pool", "kvplane_prefixes")

    def config_info(self) -> dict[str, str]:
        """Return which pool this is, and whether prefixes are found by tokens or by names."""
        by = "tokens" if self._by_tokens else "names"
        return {"kvplane_pool": self._cache.settings.pool_id, "kvplane_prefixes": by}

    def shutdown(self) -> None:
        for job in self._jobs:
            job.wait()
        self._jobs.clear()
        self._cache.close()
        _LOGGER.warning("kvplane: %s", dict(self._cache.counters))
        self._bytes.release()
