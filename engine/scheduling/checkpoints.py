"""A scheduler for models with a recurrent state: running states are in the engine, checkpoints of
them in the pool.

A step computes either one token of each of several sequences, or a chunk of one prompt: sequences
with a recurrent state cannot be packed into one row. Where both are due, steps alternate. A chunk
ends at each checkpoint: after the last full block before the prompt's last token, and after every
so many blocks. A preempted sequence is computed again from its deepest checkpoint. So is every
sequence after an aborted plan, which may have advanced its state. Where the pool has no room for a
checkpoint, the sequence goes on without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvplane.results import SequenceState

from .intents import Intent
from .scheduler import Scheduler
from .sequence import EngineSequence


class CheckpointScheduler(Scheduler):
    """A scheduler that takes a checkpoint after every ``every_blocks`` blocks of a sequence, 0 for
    its prompt's alone. ``settings``: those of ``Scheduler``.
    """

    has_states = True

    def __init__(self, every_blocks: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._every_tokens = every_blocks * self._block_size_tokens
        self._was_alone = False

    def reconcile(self, states: Iterable[SequenceState]) -> None:
        """Queue all sequences to be computed again after plans were aborted."""
        super().reconcile(states)
        running, self.running = self.running, []
        for sequence in running:
            self._recompute(sequence)

    def _append_intents(self, victims: set[int], num_passes: int) -> list[Intent]:
        due = [s for s in self._compute_order(victims) if s.num_uncomputed > 0 and s.can_run_ahead]
        alone = [s for s in due if s.num_uncomputed > 1 or s.state is None]
        self._was_alone = bool(alone) and (len(alone) == len(due) or not self._was_alone)
        if self._was_alone:
            first = alone[0]
            return [self._append([(first.kv_id, first, self._num_alone(first))])]
        return super()._append_intents(victims | {s.kv_id for s in alone}, num_passes)

    def _num_alone(self, sequence: EngineSequence) -> int:
        """Return how many tokens of one sequence a step computes: up to its next checkpoint."""
        first, every = sequence.num_computed, self._every_tokens
        stop = first + min(sequence.num_uncomputed, self._max_batch_tokens)
        ends = [self._last_end(sequence), *([(first // every + 1) * every] if every else [])]
        return min([end for end in ends if first < end < stop], default=stop) - first

    def _last_end(self, sequence: EngineSequence) -> int:
        """Return where the last block ends that is full before the sequence's last token."""
        size = self._block_size_tokens
        return (len(sequence.tokens) - 1) // size * size

    def _checkpoint(self, sequence: EngineSequence, num_slots: int) -> int:
        first, stop = sequence.num_computed, sequence.num_computed + num_slots
        end = stop // self._every_tokens * self._every_tokens if self._every_tokens else 0
        if stop == self._last_end(sequence):
            end = stop
        return end if end > first else 0
