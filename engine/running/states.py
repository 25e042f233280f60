"""Forward passes of a model with running states: a row for each sequence. A state lies in the cache
of the batch in which its sequence was computed last, until the sequence is in another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvplane.runtime.backend import DataBackend
from kvplane.transformers.models.packed import row_logits
from kvplane.transformers.states import StateCache, States

from ..scheduling.intents import Span


@dataclass(frozen=True, slots=True)
class _Batch:
    """The running states of ``num_rows`` rows, which forward passes change in place."""

    cache: StateCache
    num_rows: int


@dataclass(frozen=True, slots=True)
class _RowState:
    """The state of one sequence: a row of a batch."""

    runner: StateRunner
    batch: _Batch
    row: int

    def copy(self) -> _RowState:
        """Return an equal state, which passes of this one do not change."""
        return self.runner.gathered([self])[0]


class StateRunner:
    """Runs a causal language model with running states, whose attention is "kvplane"."""

    def __init__(self, model: PreTrainedModel, states: States, block_size_tokens: int) -> None:
        self._model = model
        self._states = states
        self._block_size_tokens = block_size_tokens

    def run(self, spans: Sequence[Span], step: DataBackend) -> torch.Tensor:
        """Compute ``spans`` of equally many tokens by ``step``, and store their checkpoints.
        Returns float32 logits [spans, vocabulary].
        """
        cache = self._batch_of(spans, step).cache
        tokens = [
            span.sequence.tokens[span.first_position : span.first_position + span.num_tokens]
            # No token is taken for a sequence that ended in an earlier pass: any will do here.
            or span.sequence.tokens[-1:]
            for span in spans
        ]
        logits = row_logits(
            self._model, tokens, [span.first_position for span in spans], cache, step
        )
        kept = [row for row, span in enumerate(spans) if span.ends_at_checkpoint]
        if kept:
            step.write_states(
                [spans[row].kv_id for row in kept],
                [self._entry(spans[row].checkpoint_position) for row in kept],
                cache.pages(kept).cpu(),
            )
        return logits

    def gathered(self, states: Sequence[_RowState]) -> list[_RowState]:
        """Copy states to a batch of their own, in this order."""
        cache = StateCache(self._model, self._states)
        pages = [state.batch.cache.pages([state.row]) for state in states]
        cache.restore(torch.cat(pages, dim=1))
        batch = _Batch(cache, len(states))
        return [_RowState(self, batch, row) for row in range(len(states))]

    def _batch_of(self, spans: Sequence[Span], step: DataBackend) -> _Batch:
        """Return the batch whose rows are the sequences of ``spans``; one without a state is alone,
        and begins, or continues from a checkpoint.
        """
        states: list[_RowState] = [span.sequence.state for span in spans]
        first: _RowState | None = states[0]
        if first is None:
            (span,) = spans
            cache = StateCache(self._model, self._states)
            if span.first_position:
                entry = self._entry(span.first_position)
                cache.restore(step.read_states([span.kv_id], [entry]))
            states = [_RowState(self, _Batch(cache, 1), 0)]
        elif any(state.batch is not first.batch for state in states) or (
            [state.row for state in states] != list(range(first.batch.num_rows))
        ):
            states = self.gathered(states)
        for span, state in zip(spans, states, strict=True):
            span.sequence.state = state
        return states[0].batch

    def _entry(self, position: int) -> int:
        """Return the table entry of a checkpoint after ``position`` tokens."""
        return position // self._block_size_tokens - 1
