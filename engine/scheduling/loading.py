"""A scheduler for pools whose data planes keep blocks in files: before a sequence is admitted, its
blocks in files are loaded, while others continue.

arrive ──► loading ──► waiting ──► scheduled
reset  ──►    ▲                            a load that fails is no more than a miss
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final

from kvplane.prefixes import Loaded

from .checkpoints import CheckpointScheduler
from .intents import Intent
from .scheduler import Scheduler
from .sequence import EngineSequence, SequenceStatus

_IDLE_S: Final = 0.005
_log = logging.getLogger("engine")

Load = Callable[[Sequence[int]], Future[Loaded]]


class LoadingScheduler(Scheduler):
    """A scheduler that loads a prompt's prefix from files before it admits the prompt. ``load``
    begins such a load. ``settings``: those of ``Scheduler``.
    """

    def __init__(self, load: Load, **settings: Any) -> None:
        super().__init__(**settings)
        self._load = load
        self._loading: list[tuple[Future[Loaded], EngineSequence]] = []

    @property
    def has_work(self) -> bool:
        """Return whether a sequence is live or loading, or something must be freed."""
        return bool(self._loading) or super().has_work

    def arrive(self, sequence: EngineSequence) -> None:
        """Begin to load a new sequence's prefix, and queue the sequence when that has ended."""
        sequence.forget_blocks()
        self._loading.append((self._load(sequence.tokens), sequence))

    def schedule(self) -> list[Intent]:
        """Return the operations of the next step; wait a moment if there are none."""
        if self._loading and not super().has_work:
            wait([future for future, _ in self._loading], _IDLE_S, FIRST_COMPLETED)
        loading, self._loading = self._loading, []
        for future, sequence in loading:
            if not future.done():
                self._loading.append((future, sequence))
                continue
            if not future.cancelled() and (error := future.exception()) is not None:
                _log.warning("nothing was loaded from files: %s", error)
            self.add(sequence)
        return super().schedule()

    def finish(self, sequence: EngineSequence) -> None:
        """Remove a sequence, which may be loading."""
        for future, each in self._loading:
            if each is sequence:
                future.cancel()
                self._loading = [other for other in self._loading if other[1] is not sequence]
                sequence.status, sequence.kv_id = SequenceStatus.FINISHED, 0
                return
        super().finish(sequence)

    def reset(self) -> None:
        """Prepare for a new session, in which prefixes are loaded again: the pool may have lost its
        memory, but not its files.
        """
        super().reset()
        waiting, self.waiting = self.waiting, []
        for sequence in waiting:
            self.arrive(sequence)


class LoadingCheckpointScheduler(LoadingScheduler, CheckpointScheduler):
    """A ``CheckpointScheduler`` that loads a prompt's prefix and its checkpoint from files. Its
    settings are those of both.
    """
