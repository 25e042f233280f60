"""One forward pass for each step: the new tokens of all sequences packed one after another, each
with its own position.

There is no cache in the model: attention goes to the data plane, which has every token before
these. Logits are computed only where a next token is due.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvplane.transformers import attention
from kvplane.transformers.models.packed import packed_logits

from ..scheduling.intents import Span


class Runner:
    """Runs a causal language model whose attention is "kvplane"."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def run(self, spans: Sequence[Span], step: attention.Step) -> torch.Tensor:
        """Compute ``spans`` in order, attention by ``step``. Returns float32 logits [spans with
        is_last, vocabulary].
        """
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for span in spans:
            stop = span.first_position + span.num_tokens
            known = span.sequence.tokens[span.first_position : stop]
            # Of a sequence that has ended in an earlier pass, nothing is taken: any token will do.
            tokens += known or span.sequence.tokens[-1:]
            positions += range(span.first_position, stop)
            if span.is_last:
                last.append(len(tokens) - 1)
        return packed_logits(self._model, tokens, positions, last, step)
