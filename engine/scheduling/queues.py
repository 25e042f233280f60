"""The queues that sequences stand in, and what waits to be forked or freed.

waiting --admit--> running --swap out--> swapped
^                 |  ^                   |
|---- recompute --|  |----- swap in -----|
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from .policy import Policy
from .sequence import EngineSequence, SequenceStatus


class Queues:
    """Each live sequence is in one of ``waiting``, ``running`` and ``swapped``, or is to be forked
    by the next step.
    """

    def __init__(self, policy: Policy) -> None:
        self._key = policy.key
        self._next_kv_id = 1
        self.waiting: list[EngineSequence] = []
        self.running: list[EngineSequence] = []
        self.swapped: list[EngineSequence] = []
        self._forks: list[tuple[int, EngineSequence]] = []  # with the kv id of the parent
        self._frees: list[int] = []
        self._finished: list[tuple[int, EngineSequence]] = []  # of those to be freed

    @property
    def has_work(self) -> bool:
        """Whether there is a sequence to go on with, or something to free."""
        return bool(self.waiting or self.running or self.swapped or self._forks or self._frees)

    def head(self) -> EngineSequence | None:
        """The live sequence that goes first."""
        return min((*self.waiting, *self.running, *self.swapped), key=self._key, default=None)

    def arrive(self, sequence: EngineSequence) -> None:
        """Queue the first sequence of a request."""
        self.add(sequence)

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence that has no blocks."""
        sequence.forget_blocks()
        insort(self.waiting, sequence, key=self._key)

    def branch(self, parent: EngineSequence, sequences: Sequence[EngineSequence]) -> None:
        """Continue the computed tokens of ``parent`` as ``sequences``, which may or may not hold
        ``parent`` itself; those with a finish reason end here.

        The first that goes on takes over the parent's blocks; the next step forks the others from
        it.
        """
        kv_id, blocks = parent.kv_id, parent.num_blocks
        sent, computed = parent.num_sent, parent.num_computed
        self.running.remove(parent)
        parent.status = SequenceStatus.FINISHED
        alive = [s for s in sequences if not s.finish_reason]
        if not alive:
            self._frees.append(kv_id)
        for sequence in sequences:
            sequence.status, sequence.kv_id = SequenceStatus.FINISHED, 0
        for i, sequence in enumerate(alive):
            sequence.num_sent, sequence.num_computed, sequence.num_due = sent, computed, 0
            sequence.num_blocks = blocks
            if i == 0:
                sequence.kv_id, sequence.status = kv_id, SequenceStatus.RUNNING
                self.running.append(sequence)
            else:
                sequence.kv_id, sequence.status = self._new_kv_id(), SequenceStatus.FORKING
                self._forks.append((kv_id, sequence))

    def finish(self, sequence: EngineSequence) -> None:
        """Take a sequence out of its queue; its blocks are freed by the next step."""
        if sequence.status is SequenceStatus.FORKING:
            self._forks = [(p, s) for p, s in self._forks if s is not sequence]
        elif sequence.status is not SequenceStatus.FINISHED:
            self._queue_of(sequence).remove(sequence)
            if sequence.kv_id:
                self._frees.append(sequence.kv_id)
                self._finished.append((sequence.kv_id, sequence))
        sequence.status, sequence.kv_id = SequenceStatus.FINISHED, 0

    def _queue_of(self, sequence: EngineSequence) -> list[EngineSequence]:
        queues = {
            SequenceStatus.WAITING: self.waiting,
            SequenceStatus.RUNNING: self.running,
            SequenceStatus.SWAPPED: self.swapped,
        }
        return queues[sequence.status]

    def _new_kv_id(self) -> int:
        kv_id, self._next_kv_id = self._next_kv_id, self._next_kv_id + 1
        return kv_id
