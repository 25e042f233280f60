"""One client below the plug-ins of all engines: it fails fast, and its failures are misses.

    look-up ──► pins ──► load ──► pages in the engine's memory ──► release
    store ──► step, pages ──► receipt with the next step

Whatever goes wrong in a session ends it, with its pins and plans, and a breaker says "miss" for
some seconds; then the next call opens another session. An engine waits for nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from kvplane import ControlClient, Execution, Layout, Session, StepResult, ops
from kvplane.errors import (
    BlockNotWrittenError,
    CapacityError,
    DeadlineExceededError,
    KvplaneError,
    LayoutMismatchError,
    StaleGenerationError,
)
from kvplane.prefixes import PrefixLoader, tokens_of
from kvplane.results import Pinned
from kvplane.sync.loop_thread import LoopThread

from .settings import ChunkSettings, namespace_of

T = TypeVar("T")

_LOGGER: Final = logging.getLogger(__name__)
_MAX_LANES: Final = 16
"""Namespaces with a session at one time: each has a region of memory on the data plane."""
_FLUSH_S: Final = 0.5
"""How long pins that nobody needs, and receipts, wait for a step that takes them along."""
_CLOSE_S: Final = 1.0
_PROBE_S: Final = 10.0
_PROBED_S: Final = 1.0
"""While loads do not pay, look-ups may still load once in ``_PROBE_S``, for ``_PROBED_S``, which
shows whether loads pay again.
"""
_OLD_SHARE: Final = 0.8
"""The speed is judged by the last load and this share of what earlier ones count."""
_TOKEN_BYTES: Final = 4
COUNTERS: Final = (
    *("hits", "misses", "misses_breaker", "misses_capacity", "misses_evicted"),
    *("misses_other_key", "misses_session", "misses_slow"),
    *("bytes_loaded", "bytes_stored", "stores_dropped", "failures"),
)
"""Prompts that look-ups found or not, and why some were misses; bytes; pages that were not stored;
failures, each of which opens the breaker.
"""


@dataclass(eq=False)
class Found:
    """Says what a look-up found. ``num_blocks``: of each prompt, the leading whole blocks that are
    cached: 0 is a miss. They are held until ``ChunkCache.release``, or for a lease's time.
    """

    num_blocks: list[int]
    _lane: _Lane
    _pinned: Pinned
    _pin_ids: range


@dataclass(eq=False)
class _Lane:
    """A session of one namespace. ``turn``: of steps. ``stores``: of stores, whose plans run one
    after another. ``unpins``: pins to undo with the next step. ``is_flushing``: whether a step is
    due that does so, and submits receipts.
    """

    namespace: str
    session: Session
    execution: Execution
    loader: PrefixLoader | None
    num_ids: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    stores: asyncio.Lock = field(default_factory=asyncio.Lock)
    unpins: list[int] = field(default_factory=list)
    is_flushing: bool = False

    def take(self, num: int) -> range:
        """Return so many ids that were never used, side by side."""
        first, self.num_ids = self.num_ids + 1, self.num_ids + num
        return range(first, first + num)

    async def step(
        self, operations: Sequence[ops.Operation], *, starts: bool = False
    ) -> StepResult:
        """Make a step. ``starts``: whether to start its plan, if it has one, before the next step:
        what nobody writes pages to says what has become of tables.
        """
        async with self.turn:
            unpins, self.unpins = self.unpins, []
            if unpins:
                operations = [*operations, ops.unpin(unpins)]
            step = await self.session.step(operations)
            if starts and step.plan is not None:
                await self.execution.start(step.plan)
            return step

    async def close(self) -> None:
        """End the session and all that it holds, if the planes can be reached."""
        with suppress(KvplaneError, TimeoutError, OSError):
            async with asyncio.timeout(_CLOSE_S):
                await self.session.close(timeout_s=_CLOSE_S)


class _Speed:
    """How fast loads were of late, and when some are tried although they do not pay."""

    def __init__(self) -> None:
        self._num_bytes = self._taken_s = self._probe_at_s = self._probe_until_s = 0.0

    def add(self, num_bytes: int, taken_s: float) -> None:
        self._num_bytes = _OLD_SHARE * self._num_bytes + num_bytes
        self._taken_s = _OLD_SHARE * self._taken_s + taken_s

    def pays(self, break_even_bytes_per_s: float) -> bool:
        """Return whether to look up and load. While loads are slower than the given speed, this is
        still true now and then, so that their speed is measured again.
        """
        now_s = time.monotonic()
        is_fast = self._num_bytes >= break_even_bytes_per_s * self._taken_s
        if is_fast or now_s >= self._probe_at_s:
            self._probe_at_s = now_s + _PROBE_S
            self._probe_until_s = now_s if is_fast else now_s + _PROBED_S
        return is_fast or now_s < self._probe_until_s


class ChunkCache:
    """Keeps chunks in a pool. Thread-safe; it has a thread of its own. No method raises but
    ``open``, and none blocks but ``open`` and ``close``: futures have results, never errors.
    """

    def __init__(
        self,
        settings: ChunkSettings,
        *,
        model_id: str,
        page_bytes: int,
        block_tokens: int = 16,
    ) -> None:
        """``model_id``: whose bytes the chunks are: model, weights, dtype, layout, ranks; those of
        another are refused. ``page_bytes``: the most bytes of a chunk. Raises InvalidRequestError
        for an id or a number that is out of range.
        """
        self.settings = settings
        self.layout = Layout.of_opaque_pages(model_id, page_bytes, block_size_tokens=block_tokens)
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._lock = threading.Lock()
        self._num_queued_bytes = 0
        self._shut_until_s = 0.0
        self._speed = _Speed()
        self._lanes: OrderedDict[str, asyncio.Task[_Lane]] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = LoopThread("kvplane chunks")
        self._control = self._loop.call(
            lambda: ControlClient(
                settings.control_plane, tls=settings.tls, timeout_s=settings.connect_s
            )
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """Count what was done so far, by the names of ``COUNTERS``."""
        with self._lock:
            return dict(self._counters)

    def open(self) -> None:
        """Connect. Raises LayoutMismatchError naming what differs where the pool is of another
        engine. Without a pool it logs why, and looks for one with later calls.
        """
        try:
            self._loop.run(self._opened(""))
        except LayoutMismatchError:
            raise
        except (KvplaneError, TimeoutError, OSError) as error:
            self._shut("", error)

    def look_up(self, namespace: str, prompts: Sequence[bytes]) -> Future[Found | None]:
        """Look prompts up, each by itself, and hold what is cached of them. ``prompts``: int32
        columns of tokens. The result is None where nothing is known in time: all are misses.
        """
        return self._begin(self._look_up(namespace, prompts))

    def look_up_named(
        self, namespace: str, names: Sequence[bytes], *, to_load: bool = True
    ) -> Future[Found | None]:
        """Look up chunks that were stored by name. In the result, ``num_blocks`` is 1 for a cached
        chunk and 0 otherwise. ``to_load``: False to check only which chunks need not be stored
        again; this reads no files, and works even while loads are declined as too slow.
        """
        return self._begin(self._look_up(namespace, [*map(_named, names)], to_load=to_load))

    def load(
        self,
        found: Found,
        places: Sequence[tuple[int, int]],
        into: Sequence[memoryview],
        keys: Sequence[bytes] = (),
    ) -> Future[list[int]]:
        """Load blocks that were found into buffers of ``page_bytes``. ``places``: of each, the
        prompt's index in the look-up and the block's in the prompt, which is 0 for a name.
        ``keys``: for each block, or none.

        The result is how many bytes each has: 0 is a miss, also of one with another key.
        """
        entries = [found._pinned.entries(item)[block] for item, block in places]
        return self._begin(self._load(found, entries, into, keys))

    def release(self, found: Found) -> None:
        """Let go of what a look-up holds. Harmless when called again."""
        self._loop.post(lambda: self._release(found))

    def store(
        self,
        namespace: str,
        prompt: bytes,
        first_block: int,
        pages: Sequence[memoryview],
        keys: Sequence[bytes] = (),
    ) -> Future[list[bool]]:
        """Store pages of a prompt's blocks from ``first_block`` on; those before must be cached.
        ``prompt``: int32 column of whole blocks, up to the end of the last page. The pages are read
        until the future has its result: whether each is cached.
        """
        return self._begin_store(
            pages, lambda: self._store(namespace, prompt, first_block, pages, keys)
        )

    def store_named(
        self,
        namespace: str,
        names: Sequence[bytes],
        pages: Sequence[memoryview],
        keys: Sequence[bytes] | None = None,
    ) -> Future[list[bool]]:
        """Store pages, each by a name of its own. ``keys``: None for the names."""
        given = [name[:64] for name in names] if keys is None else keys
        return self._begin_store(
            pages, lambda: self._store_named(namespace, [*map(_named, names)], pages, given)
        )

    def close(self) -> None:
        """End all sessions, if the planes can be reached, and the thread."""
        with suppress(KvplaneError, TimeoutError, OSError):
            self._loop.run(self._close())
        self._loop.close()

    # On the thread

    async def _look_up(
        self, namespace: str, prompts: Sequence[bytes], *, to_load: bool = True
    ) -> Found | None:
        async def look_up(lane: _Lane) -> Found:
            return await self._pin(lane, prompts)

        found = None
        if not to_load or self._speed.pays(self.settings.break_even_bytes_per_s):
            found = await self._tried(namespace, self.settings.lookup_s, look_up)
        else:
            self._count(misses_slow=len(prompts))
        if found is not None and to_load:
            found = await self._with_files(found, prompts)
        num_hits = 0 if found is None else sum(map(bool, found.num_blocks))
        self._count(hits=num_hits, misses=len(prompts) - num_hits)
        return found

    async def _with_files(self, found: Found, prompts: Sequence[bytes]) -> Found | None:
        """Return what is found once missing blocks were read from files, as far as there is time:
        reading them is a transfer.
        """
        loader, transfer_s = found._lane.loader, self.settings.transfer_s
        missing = [
            prompt
            for prompt, num in zip(prompts, found.num_blocks, strict=True)
            if num < len(prompt) // self._block_bytes
        ]
        if loader is None or not missing:
            return found

        async def look_up(lane: _Lane) -> Found:
            with suppress(TimeoutError, DeadlineExceededError):  # slow files are no failure
                async with asyncio.timeout(transfer_s):
                    if all(len(prompt) == self._block_bytes for prompt in missing):  # names
                        await loader.load_blocks(missing)
                    else:
                        for prompt in missing:
                            await loader.load(prompt)
            self._release(found)
            return await self._pin(lane, prompts)

        return await self._tried(found._lane, transfer_s + self.settings.lookup_s, look_up)

    async def _pin(self, lane: _Lane, prompts: Sequence[bytes]) -> Found:
        ids = lane.take(max(1, len(prompts)))
        step = await lane.step([ops.pin(ids, prompts)], starts=True)
        pinned = step.results[0].pinned
        return Found(pinned.num_blocks.tolist(), lane, pinned, ids)

    async def _load(
        self,
        found: Found,
        entries: Sequence[int],
        into: Sequence[memoryview],
        keys: Sequence[bytes],
    ) -> list[int]:
        nothing = [0] * len(entries)

        async def load(lane: _Lane) -> list[int]:
            try:
                return await lane.execution.read_pages(found._pinned, into, entries, keys=keys)
            except (StaleGenerationError, BlockNotWrittenError):
                self._count(misses_evicted=len(entries))
                return nothing

        if not entries:
            return nothing
        began_s = time.monotonic()
        loaded = await self._tried(found._lane, self.settings.transfer_s, load)
        if loaded is None:
            return nothing
        self._speed.add(sum(loaded), time.monotonic() - began_s)
        self._count(bytes_loaded=sum(loaded), misses_other_key=loaded.count(0))
        return loaded

    async def _store(
        self,
        namespace: str,
        prompt: bytes,
        first_block: int,
        pages: Sequence[memoryview],
        keys: Sequence[bytes],
    ) -> list[bool]:
        num_blocks = first_block + len(pages)

        async def store(lane: _Lane) -> list[bool]:
            (sequence_id,) = lane.take(1)
            step = await lane.step([ops.admit(sequence_id, prompt, ends_with_plan=True)])
            if step.results[0].failures or step.plan is None:
                return await self._dropped(lane, step, len(pages))
            num_cached = step.results[0].admit.num_cached_tokens * _TOKEN_BYTES
            begin, rest = divmod(num_cached, self._block_bytes)
            # All is cached already, or what comes before the pages is not: nothing can be written.
            if rest or not first_block <= begin < num_blocks:
                await lane.session.abort_plans()
                return [rest > 0] * len(pages)
            given = slice(begin - first_block, None)
            await lane.execution.write_pages(
                step.plan,
                [sequence_id] * (num_blocks - begin),
                pages[given],
                range(begin, num_blocks),
                keys=keys[given],
            )
            self._count(bytes_stored=sum(map(len, pages[given])))
            self._flush_soon(lane)
            return [True] * len(pages)

        done = await self._in_turn(namespace, store)
        return [False] * len(pages) if done is None else done

    async def _store_named(
        self,
        namespace: str,
        names: Sequence[bytes],
        pages: Sequence[memoryview],
        keys: Sequence[bytes],
    ) -> list[bool]:
        async def store(lane: _Lane) -> list[bool]:
            ids = lane.take(len(names))
            step = await lane.step(
                [
                    ops.admit(i, name, skip_prefix_lookup=True, ends_with_plan=True)
                    for i, name in zip(ids, names, strict=True)
                ]
            )
            done = [not result.failures for result in step.results[: len(names)]]
            if step.plan is None or not any(done):
                return await self._dropped(lane, step, len(pages))
            chosen = [i for i, is_done in enumerate(done) if is_done]
            await lane.execution.write_pages(
                step.plan,
                [ids[i] for i in chosen],
                [pages[i] for i in chosen],
                keys=[keys[i] for i in chosen] if keys else (),
            )
            self._count(
                bytes_stored=sum(len(pages[i]) for i in chosen),
                stores_dropped=len(pages) - len(chosen),
            )
            self._flush_soon(lane)
            return done

        stored = await self._in_turn(namespace, store) if names else []
        return [False] * len(pages) if stored is None else stored

    async def _dropped(self, lane: _Lane, step: StepResult, num_pages: int) -> list[bool]:
        """Return that nothing was stored, once the step's plan has run: it may say that earlier
        sequences have ended.
        """
        if step.plan is not None:
            await lane.execution.start(step.plan)
        self._count(stores_dropped=num_pages)
        return [False] * num_pages

    async def _in_turn(self, namespace: str, action: Callable[[_Lane], Awaitable[T]]) -> T | None:
        """Return the result of a store in its turn: the time that it waits does not count."""
        lane = await self._tried(namespace, self.settings.transfer_s, _itself)
        if lane is None:
            return None
        async with lane.stores:
            return await self._tried(lane, self.settings.transfer_s, action)

    async def _tried(
        self, where: str | _Lane, timeout_s: float, action: Callable[[_Lane], Awaitable[T]]
    ) -> T | None:
        """Return the result of an action in a session; None if it failed, or is not in time."""
        if time.monotonic() < self._shut_until_s:
            self._count(misses_breaker=1)
            return None
        namespace = where if isinstance(where, str) else where.namespace
        opened = False
        try:
            async with asyncio.timeout(timeout_s):
                lane = await self._opened(namespace)
                opened = True
                if isinstance(where, _Lane) and lane is not where:
                    self._count(misses_session=1)
                    return None
                return await action(lane)
        except TimeoutError as error:
            # A session that is still being opened may be of use when the breaker closes.
            self._shut(namespace if opened else None, error)
        except CapacityError:
            self._count(misses_capacity=1)
        except (KvplaneError, OSError) as error:
            self._shut(namespace, error)
        return None

    async def _opened(self, namespace: str) -> _Lane:
        """Return the session of a namespace, opened once for all who ask."""
        opening = self._lanes.get(namespace)
        if opening is None:
            opening = self._lanes[namespace] = asyncio.ensure_future(self._open(namespace))
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())
            while len(self._lanes) > _MAX_LANES:
                self._end(self._lanes.popitem(last=False)[1])
        self._lanes.move_to_end(namespace)
        return await asyncio.shield(opening)

    async def _open(self, namespace: str) -> _Lane:
        full = namespace_of(self.settings.namespace, namespace) if namespace else ""
        settings, control = self.settings, self._control
        open_session = control.open_session(
            settings.pool_id,
            self.layout,
            "chunks",
            namespace=full or settings.namespace,
            timeout_s=settings.connect_s,
        )
        async with asyncio.timeout(settings.connect_s):
            await control.wait_ready(settings.pool_id, timeout_s=settings.connect_s)
            session = await open_session
            execution = await session.open_execution()
            loader = None
            if all(shard.has_file_tier for shard in session.shards):
                beside = await control.open_session(
                    settings.pool_id, self.layout, "files", namespace=session.namespace
                )
                loader = PrefixLoader(control, beside, timeout_s=settings.transfer_s)
        return _Lane(namespace, session, execution, loader)

    def _shut(self, namespace: str | None, error: BaseException) -> None:
        """Answer misses for some time, and end the session that has failed, if one has."""
        self._shut_until_s = time.monotonic() + self.settings.breaker_s
        self._count(failures=1)
        _LOGGER.warning(
            "no chunks of %s for %g s: %s",
            self.settings.control_plane,
            self.settings.breaker_s,
            str(error) or type(error).__name__,
        )
        if namespace is not None and (lane := self._lanes.pop(namespace, None)) is not None:
            self._loop.post(lambda: self._end(lane, has_failed=True))

    def _end(self, opening: asyncio.Task[_Lane], *, has_failed: bool = False) -> None:
        """End a session in the background."""

        async def end() -> None:
            with suppress(KvplaneError, TimeoutError, OSError, asyncio.CancelledError):
                lane = await opening
                async with asyncio.timeout(_CLOSE_S):
                    if not has_failed:
                        await lane.session.submit_receipts()
                    if lane.loader is not None:
                        await lane.loader.close()
                await lane.close()

        if not opening.done():
            opening.cancel()
        self._spawn(end())

    def _release(self, found: Found) -> None:
        ids, found._pin_ids = found._pin_ids, range(0)
        if ids:
            found._lane.unpins.extend(ids)
            self._flush_soon(found._lane)

    def _flush_soon(self, lane: _Lane) -> None:
        """Undo pins and submit receipts by a step of their own, unless one comes before."""

        async def flush() -> None:
            await asyncio.sleep(_FLUSH_S)
            lane.is_flushing = False
            await self._tried(lane, self.settings.transfer_s, _flush)

        if not lane.is_flushing:
            lane.is_flushing = True
            self._spawn(flush())

    async def _close(self) -> None:
        for opening in self._lanes.values():
            self._end(opening)
        self._lanes.clear()
        async with asyncio.timeout(3 * _CLOSE_S):
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._control.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Helpers

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return self._loop.begin(coroutine)

    def _begin_store(
        self, pages: Sequence[memoryview], begin: Callable[[], Coroutine[Any, Any, list[bool]]]
    ) -> Future[list[bool]]:
        """Begin a store, unless too many bytes wait already."""
        num_bytes = sum(map(len, pages))
        with self._lock:
            fits = self._num_queued_bytes + num_bytes <= self.settings.max_queued_bytes
            self._num_queued_bytes += num_bytes if fits else 0
        if not fits:
            self._count(stores_dropped=len(pages))
            dropped: Future[list[bool]] = Future()
            dropped.set_result([False] * len(pages))
            return dropped
        stored = self._begin(begin())
        stored.add_done_callback(lambda _: self._unqueue(num_bytes))
        return stored

    def _unqueue(self, num_bytes: int) -> None:
        with self._lock:
            self._num_queued_bytes -= num_bytes

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counters.update(numbers)


async def _itself(lane: _Lane) -> _Lane:
    return lane


async def _flush(lane: _Lane) -> None:
    await lane.step([], starts=True)


def _named(name: bytes) -> bytes:
    return ops.pack_tokens(tokens_of(name))


def load_whole(
    cache: ChunkCache,
    found: Found,
    items: Sequence[int],
    into: Sequence[memoryview],
    keys: Sequence[bytes] = (),
) -> Future[list[bool]]:
    """Load chunks that were found by name into memory of just their size, where the pages of the
    pool may be larger. ``items``: their indices in the look-up. ``keys``: as of
    ``ChunkCache.load``. ``into``: of at most a page each, writable until the future has its result:
    whether each chunk came whole and has the size of its memory. What a chunk that did not come
    leaves is undefined.
    """
    page_bytes = cache.layout.groups[0].page_bytes
    rooms = [
        room if len(room) == page_bytes else memoryview(bytearray(page_bytes)) for room in into
    ]
    whole: Future[list[bool]] = Future()

    def finish(loading: Future[list[int]]) -> None:
        done = [size == len(chunk) for size, chunk in zip(loading.result(), into, strict=True)]
        for chunk, room, is_whole in zip(into, rooms, done, strict=True):
            if is_whole and room is not chunk:
                chunk[:] = room[: len(chunk)]
        whole.set_result(done)

    places = [(item, 0) for item in items]
    cache.load(found, places, rooms, keys).add_done_callback(finish)
    return whole
