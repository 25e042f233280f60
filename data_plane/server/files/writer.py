"""Writes blocks to files behind the plans' backs: those of prefixes that were used twice.

    plan finds a prefix ──► noted ──► this thread: read a block (a command) ──► write its file

Nothing waits for it. A block is read as a command between those of sessions, if it still is what it
was; its file is written outside of them. After an error nothing is written for a while.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from functools import partial
from typing import Final

import torch

from data_plane.execution.executor import Executor
from data_plane.files.block_files import BlockFiles
from data_plane.files.names import block_names, scope_of
from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.plans.contents.reused_blocks import ReusedPrefix
from data_plane.server.fair_queue import Lane
from data_plane.server.files.counts import FileCounts
from data_plane.server.worker_thread import WorkerThread
from kvplane.errors import KvplaneError

_LOGGER: Final = logging.getLogger(__name__)
_LANE: Final = Lane("the file tier")
PAUSE_S: Final = 10.0
"""After an error, until the next file is written."""


class FileWriter:
    """Writes from ``start`` to ``stop``."""

    def __init__(
        self, executor: Executor, worker: WorkerThread, files: BlockFiles, counts: FileCounts
    ) -> None:
        self._executor = executor
        self._worker = worker
        self._files = files
        self._counts = counts
        self._wake = threading.Event()
        self._is_stopping = False
        self._paused_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="file-tier", daemon=True)

    def start(self) -> None:
        """Find the files of an earlier process, then write."""
        self._executor.published.watch_reuse(self._wake.set)
        self._thread.start()

    def stop(self) -> None:
        """Write no more; returns when the file that is being written is."""
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
                    self._executor.published.take_reused, _LANE
                ).result():
                    self._write(prefix)
            except (RuntimeError, KvplaneError) as error:
                # As of torch where memory is short, or of the worker thread where it has ended.
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
        for name, (block, generation) in zip(names, blocks, strict=True):
            if not self._files.find([name]):
                key = self._files.key_of(scope.tenant, scope.root, parent, name, generation)
                if self._is_stopping or time.monotonic() < self._paused_until_s:
                    return
                num_forgotten = self._files.num_forgotten(scope.tenant)
                data = self._worker.submit(partial(self._read, block, generation), _LANE).result()
                try:
                    if data is None or not self._files.write(key, data, num_forgotten):
                        return
                except OSError as error:
                    self._paused_until_s = time.monotonic() + PAUSE_S
                    self._counts.failed(errno.errorcode.get(error.errno or 0, "OTHER"))
                    _LOGGER.warning("a block was not written to a file: %s", error)
                    return
                self._counts.moved("written", 1)
            parent = name

    def _read(self, block: int, generation: int) -> bytes | None:
        data = self._executor.published.read(block, generation)
        if data is None:
            return None
        with device_errors():
            return data.cpu().contiguous().view(torch.uint8).numpy().tobytes()
