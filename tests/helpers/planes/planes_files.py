"""The file tier of a data plane in the walk: the real one, whose threads' work a rule does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from data_plane import Executor
from data_plane.files.disk import Disk
from data_plane.plans.contents.reused_blocks import ReusedPrefix
from data_plane.server.fair_queue import Lane
from data_plane.server.file_tier import FileTier
from data_plane.server.worker_thread import WorkerThread
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import execution_pb2 as pb

_LANE = Lane("engine")


class _QuickDisk(Disk):
    """A disk that the walk does not wait for."""

    def sync(self, fd: int) -> None:
        """Do nothing: no power fails here."""


class ProcessFiles:
    """Files of one process, which no other of its shard opens before ``close``."""

    def __init__(self, executor: Executor, folder: Path, num_uses: int) -> None:
        self._executor = executor
        self._worker = WorkerThread()
        self.tier = FileTier(
            executor,
            self._worker,
            folder=folder,
            max_bytes=1 << 16,
            num_uses=num_uses,
            disk=_QuickDisk(),
        )
        self.tier.files.scan()
        executor.blocks.watch_reuse(lambda: None, num_uses)
        self._noted: list[ReusedPrefix] = []

    @property
    def num_loaded(self) -> int:
        """How many files were ever loaded, of blocks and of checkpoints."""
        return self.tier.counts.num_blocks["loaded"]

    def write(self, rng: Random) -> int:
        """Write some of the prefixes that were reused, perhaps long ago; return how many blocks."""
        self._noted += self._executor.blocks.take_reused()
        before = self.tier.counts.num_blocks["written"]
        for _ in range(rng.randint(min(1, len(self._noted)), len(self._noted))):
            self.tier._writer._write(self._noted.pop(rng.randrange(len(self._noted))))
        return self.tier.counts.num_blocks["written"] - before

    def load(
        self, session_id: int, number: int, sequence_id: int, token_ids: bytes
    ) -> pb.LoadFileBlocksResponse:
        """Load what a plan computes for a sequence. ``token_ids``: up to the end of its span."""
        request = pb.LoadFileBlocksRequest(sequence_id=sequence_id, token_ids=token_ids)
        return asyncio.run(self.tier.load(session_id, number, request, _LANE))

    def forget(self, message: rpb.ForgetFiles) -> None:
        """Delete the files that a control plane names."""
        asyncio.run(self.tier.forget(message))

    def close(self) -> None:
        """Let go of the folder."""
        self.tier.stop()
        self._worker.close()
