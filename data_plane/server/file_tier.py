"""The file tier: blocks in files below the memory tiers, of one shard.

    LoadFileBlocks without a plan ──► how many leading blocks of a prompt have files
    LoadFileBlocks ──► plan started ──► files read and checked ──► written as commands ──► receipt

A load fills the blocks that a plan allocated, as pushes do. They are published by the plan's
receipt, which is signed once every slot was written from a valid file. Until then no session finds
them, so a corrupt file is never more than a miss. Checkpoints of states that the plan keeps are
read first: without them the blocks are of no use.

    plan finds a prefix ──► noted ──► a thread: read a block (a command) ──► write its file

Blocks of prefixes that were used twice are written to files in the background: no plan waits for
it. A block is read by a command between those of sessions, if its generation is still the same; its
file is written outside of commands. After an error nothing is written for ``PAUSE_S``.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch

from data_plane.blocks_from_outside import BlockRange, write_bytes
from data_plane.execution.executor import Executor
from data_plane.files.block_files import BlockFiles
from data_plane.files.disk import Disk
from data_plane.files.names import Scope, block_names, folder_name, part_name, scope_of
from data_plane.files.record import BlockKey, FileMissError
from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.plans.contents.reused_blocks import ReusedPrefix
from data_plane.server.fair_queue import Lane
from data_plane.server.worker_thread import WorkerThread
from kvplane.errors import InvalidRequestError, KvplaneError, PlaneUnavailableError
from kvplane.wire import columns
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import execution_pb2 as pb

CHUNK_BYTES: Final = 2 * 1024 * 1024
_MAX_LOADS: Final = 4

T = TypeVar("T")


_LOGGER: Final = logging.getLogger(__name__)
_LANE: Final = Lane("the file tier")
PAUSE_S: Final = 10.0
"""Seconds for which no file is written after an error."""


class FileCounts:
    """Counters of the file tier, which never decrease. Metrics read them. Thread-safe."""

    def __init__(self) -> None:
        self.num_blocks: Counter[str] = Counter()
        """Blocks by direction: "written" or "loaded"."""
        self.num_misses: Counter[str] = Counter()
        """Blocks that could not be loaded from their files, by ``FileMissError.reason``."""
        self.num_write_errors: Counter[str] = Counter()
        """Failed writes by the operating system's name of the error, such as "ENOSPC"."""
        self._lock = threading.Lock()

    def moved(self, direction: str, num: int) -> None:
        """Count blocks that were written or loaded."""
        with self._lock:
            self.num_blocks[direction] += num

    def missed(self, reason: str) -> None:
        """Count a block that could not be loaded."""
        with self._lock:
            self.num_misses[reason] += 1

    def failed(self, reason: str) -> None:
        """Count a failed write."""
        with self._lock:
            self.num_write_errors[reason] += 1


class FileWriter:
    """Writes reused blocks to files in the background, from ``start`` to ``stop``."""

    def __init__(
        self,
        executor: Executor,
        worker: WorkerThread,
        files: BlockFiles,
        counts: FileCounts,
        *,
        num_uses: int,
    ) -> None:
        """``num_uses``: 2 to write blocks that are used again, 1 to write all of a prompt's."""
        self._num_uses = num_uses
        self._executor = executor
        self._worker = worker
        self._files = files
        self._counts = counts
        self._wake = threading.Event()
        self._is_stopping = False
        self._paused_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="file-tier", daemon=True)

    def start(self) -> None:
        """Find the files that an earlier process left, then start to write."""
        self._executor.blocks.watch_reuse(self._wake.set, self._num_uses)
        self._thread.start()

    def stop(self) -> None:
        """Stop writing. Returns once the file that is being written is complete."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._files.scan(lambda: self._is_stopping)
        while not self._is_stopping:
            self._wake.wait()
            self._wake.clear()
            try:
                for prefix in self._worker.submit(
                    self._executor.blocks.take_reused, _LANE
                ).result():
                    self._write(prefix)
            except (RuntimeError, KvplaneError) as error:
                # RuntimeError: from torch if memory is short, or from the closed worker thread.
                if not self._is_stopping:
                    self._paused_until_s = time.monotonic() + PAUSE_S
                    _LOGGER.warning("blocks were not written to files: %s", error)

    def _write(self, prefix: ReusedPrefix) -> None:
        fingerprint = self._executor.layout.fingerprint
        size = self._executor.layout.block_size_tokens
        scope = scope_of(fingerprint, prefix.tenant, prefix.namespace)
        parent = scope.root
        blocks = zip(prefix.blocks.tolist(), prefix.generations.tolist(), strict=True)
        names = block_names(scope.root, prefix.token_ids, size)
        for i, (name, (block, generation)) in enumerate(zip(names, blocks, strict=True)):
            key = self._files.key_of(scope.tenant, scope.root, parent, name, generation)
            if not self._write_one(key, 0, block):
                return
            if i in prefix.checkpoints:
                block, generation = prefix.checkpoints[i]
                group = len(self._executor.layout.groups) - 1
                self._write_one(self._files.checkpoint_of(key, generation), group, block)
            parent = name

    def _write_one(self, key: BlockKey, group: int, block: int) -> bool:
        """Write the file of a layer group's block if there is none. Returns whether there is."""
        if self._files.use(key.name):
            return True
        if self._is_stopping or time.monotonic() < self._paused_until_s:
            return False
        num_forgotten = self._files.num_forgotten(key.tenant)
        read = partial(self._read, group, block, key.generation)
        data = self._worker.submit(read, _LANE).result()
        try:
            if data is None or not self._files.write(key, data, num_forgotten):
                return False
        except OSError as error:
            self._paused_until_s = time.monotonic() + PAUSE_S
            self._counts.failed(errno.errorcode.get(error.errno or 0, "OTHER"))
            _LOGGER.warning("a block was not written to a file: %s", error)
            return False
        self._counts.moved("written", 1)
        return True

    def _read(self, group: int, block: int, generation: int) -> bytes | None:
        data = self._executor.blocks.read_published(group, block, generation)
        if data is None:
            return None
        with device_errors():
            return data.cpu().contiguous().view(torch.uint8).numpy().tobytes()


class LoadSlots:
    """Bounds how many loads run at once. A caller's loads wait for its own first, so that others
    wait for at most ``num`` - 1 of each caller, however many it requests.
    """

    def __init__(self, num: int) -> None:
        self._all = asyncio.Semaphore(num)
        self._num_of_one = max(1, num - 1)
        self._own: dict[str, asyncio.Semaphore] = {}
        self._num_here: Counter[str] = Counter()

    @asynccontextmanager
    async def taken(self, caller: str) -> AsyncIterator[None]:
        """Wait until a load of ``caller`` may run, and count it as running inside the context."""
        own = self._own.setdefault(caller, asyncio.Semaphore(self._num_of_one))
        self._num_here[caller] += 1
        try:
            async with own, self._all:
                yield
        finally:
            self._num_here[caller] -= 1
            if not self._num_here[caller]:
                del self._num_here[caller], self._own[caller]


class _Chunk(NamedTuple):
    """Blocks of a layer group that are read and written at once: table entries from ``first``."""

    group: int
    first: int
    keys: list[BlockKey]


class FileTier:
    """Keeps an executor's blocks in files of its own, from ``start`` to ``stop``."""

    def __init__(
        self,
        executor: Executor,
        worker: WorkerThread,
        *,
        folder: Path,
        max_bytes: int,
        num_uses: int,
        disk: Disk | None = None,
    ) -> None:
        """``folder``: several data planes may share it. ``num_uses``: as of ``FileWriter``.

        Raises InvalidRequestError for a pool of several layer groups beside that of states, or with
        an attention window, and as ``BlockFiles``.
        """
        layout, shard = executor.layout, executor.shard
        if len(layout.attention_groups) > 1 or layout.groups[0].sliding_window_tokens:
            raise InvalidRequestError(
                "is for pools of one layer group, and perhaps one of states, without an attention"
                " window",
                field="file_tier_dir",
            )
        self.counts = FileCounts()
        self._executor = executor
        self._worker = worker
        groups = range(len(layout.groups))
        parts = [
            part_name(layout.fingerprint, shard, of_states=group == layout.state_group)
            for group in groups
        ]
        self._block_bytes = [shard.block_bytes(layout, group) for group in groups]
        self._layers = [shard.group_layers(layout, group) for group in groups]
        self.files = BlockFiles(
            folder / folder_name(parts[0], executor.pool_id, shard),
            *zip(parts, self._block_bytes, strict=True),
            max_bytes=max_bytes,
            disk=disk,
        )
        self._writer = FileWriter(executor, worker, self.files, self.counts, num_uses=num_uses)
        self._threads = ThreadPoolExecutor(_MAX_LOADS, "file-load")
        self._loads = LoadSlots(_MAX_LOADS)
        self._num_chunk_blocks = max(1, CHUNK_BYTES // self._block_bytes[0])

    def start(self) -> None:
        """Find the files that an earlier process left, and begin to write in the background."""
        self._writer.start()

    def stop(self) -> None:
        """Stop writing and loading. Returns when no file is in use."""
        self._writer.stop()
        self._threads.shutdown()
        self.files.close()

    async def find(self, session_id: int, token_ids: bytes) -> int:
        """Return how many leading blocks of a prompt have files, up to the last that has a
        checkpoint where states are kept. Raises InvalidRequestError, SessionExpiredError.
        """
        columns.read(columns.INT32, token_ids, "token_ids")
        scope = await self._scope(session_id)
        size = self._executor.layout.block_size_tokens
        return await self._off_loop(
            lambda: self.files.find(block_names(scope.root, token_ids, size))
        )

    async def load(
        self, session_id: int, plan_number: int, request: pb.LoadFileBlocksRequest, lane: Lane
    ) -> pb.LoadFileBlocksResponse:
        """Load the blocks that a started plan computes for a sequence from files, and the
        checkpoints that it keeps. ``lane`` is charged for the writes. Raises InvalidRequestError,
        and as ``Executor.write_blocks``.
        """
        of_span = partial(
            self._executor.blocks.of_span, session_id, request.sequence_id, plan_number
        )
        span, kept, may_load = await self._worker.run(of_span, lane)
        size = self._executor.layout.block_size_tokens
        columns.read(columns.INT32, request.token_ids, "token_ids", length=span.stop * size)
        scope = await self._scope(session_id)
        if not may_load:
            return pb.LoadFileBlocksResponse()
        num_loaded, receipt = 0, None
        async with self._loads.taken(lane.caller):
            keys = await self._off_loop(partial(self._keys, scope, request.token_ids))
            chunks = [
                _Chunk(len(self._layers) - 1, i, [self.files.checkpoint_of(keys[i])]) for i in kept
            ]
            size = self._num_chunk_blocks
            chunks += [_Chunk(0, i, keys[i : min(i + size, span.stop)]) for i in span[::size]]
            following = self._begin_read(chunks[0])
            for i, chunk in enumerate(chunks):
                num_read, data = await following
                is_whole = num_read == len(chunk.keys)
                if is_whole and i + 1 < len(chunks):
                    following = self._begin_read(chunks[i + 1])
                if num_read:
                    layers = self._layers[chunk.group]
                    written = BlockRange(
                        request.sequence_id,
                        chunk.first,
                        num_read,
                        chunk.group,
                        first_layer=layers[0],
                        num_layers=len(layers),
                    )
                    write = partial(
                        write_bytes, self._executor, session_id, written, data, plan_number
                    )
                    receipt = await self._worker.run(write, lane)
                    num_loaded += num_read if chunk.group == 0 else 0
                    self.counts.moved("loaded", num_read)
                if not is_whole:
                    break
        return pb.LoadFileBlocksResponse(num_blocks=num_loaded, receipt=receipt)

    async def forget(self, message: rpb.ForgetFiles) -> None:
        """Delete the files that a message names, and cancel their writes. Raises OSError."""
        tenant = None if message.all_tenants else message.tenant
        await self._worker.run(partial(self._executor.blocks.drop_reused, tenant))
        fingerprint = self._executor.layout.fingerprint
        scope = scope_of(fingerprint, message.tenant, message.namespace)
        forget = self.files.forget
        if message.all_tenants:
            forget = partial(forget, everything=True)
        elif message.all_namespaces:
            forget = partial(forget, tenant=scope.tenant)
        elif message.token_ids:
            forget = partial(self._forget_prefix, scope, message.token_ids)
        else:
            forget = partial(forget, tenant=scope.tenant, root=scope.root)
        await self._off_loop(forget)

    def _forget_prefix(self, scope: Scope, token_ids: bytes) -> None:
        """Delete a prefix's files. Not on the event loop: a long one takes 100,000 hashes."""
        *_, name = block_names(scope.root, token_ids, self._executor.layout.block_size_tokens)
        self.files.forget(tenant=scope.tenant, name=name)

    async def _scope(self, session_id: int) -> Scope:
        names = await self._worker.run(partial(self._executor.blocks.scope_of, session_id))
        return scope_of(self._executor.layout.fingerprint, *names)

    def _keys(self, scope: Scope, token_ids: bytes) -> list[BlockKey]:
        size = self._executor.layout.block_size_tokens
        names = [scope.root, *block_names(scope.root, token_ids, size)]
        return [self.files.key_of(*scope, parent, name) for parent, name in pairwise(names)]

    def _begin_read(self, chunk: _Chunk) -> asyncio.Future[tuple[int, bytearray]]:
        reading = asyncio.ensure_future(self._off_loop(partial(self._read, chunk)))
        # Retrieves the exception, which no one else does if the caller stops waiting.
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return reading

    async def _off_loop(self, call: Callable[[], T]) -> T:
        """Run ``call`` on a thread for files, and return its result."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except RuntimeError as error:
            raise PlaneUnavailableError("the data plane is stopping") from error

    def _read(self, chunk: _Chunk) -> tuple[int, bytearray]:
        """Read blocks' files up to the first that is missing or invalid. Returns how many were
        read, and their blocks, layer by layer.
        """
        found = []
        try:
            for key in chunk.keys:
                found.append(self.files.read(key))
        except FileMissError as miss:
            self.counts.missed(miss.reason)
        num_bytes = self._block_bytes[chunk.group]
        size = num_bytes // len(self._layers[chunk.group])
        layers = range(0, num_bytes, size)
        return len(found), bytearray().join(
            block[at : at + size] for at in layers for block in found
        )
