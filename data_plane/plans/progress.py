"""Counts how much of a plan, or of one of its passes, is written: each span's tokens, by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvplane.errors import InvalidRequestError


class Progress:
    """Which tokens of each span are written in which layer (by index) in a plan or pass."""

    def __init__(self, num_layers: int, num_tokens: NDArray[np.int64]) -> None:
        """``num_tokens``: [S], the number of tokens of each span."""
        self._num_tokens = num_tokens
        self._written = [len(num_tokens) == 0] * num_layers
        # [num_layers, S]: tokens written; made when spans are first written one by one.
        self._of_spans: NDArray[np.int64] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every layer was written."""
        return all(self._written)

    @property
    def num_layers(self) -> int:
        """Number of layers of the shard."""
        return len(self._written)

    @property
    def has_begun(self) -> bool:
        """Whether any token was written in any layer."""
        return any(self._written) or self._of_spans is not None

    def is_written(self, layer: int) -> bool:
        """Return whether all spans of a layer were written."""
        return self._written[layer]

    def finish_layer(self, layer: int) -> None:
        """Record that all spans of the layer were written."""
        self._written[layer] = True

    def check_no_gap(self, layers: Sequence[int], span: int, begin: int) -> None:
        """Raise InvalidRequestError unless ``layers`` have all of a span's tokens before
        ``begin``.
        """
        for layer in layers:
            num_written = self._num_written(layer, span)
            if num_written < begin:
                raise InvalidRequestError(
                    f"{num_written} tokens of the span have been written so far, and these blocks "
                    f"begin with its token {begin}: write those between first",
                    field="entries",
                )

    def extend(self, layers: Sequence[int], span: int, end: int) -> None:
        """Record that the tokens of a span before ``end`` were written in ``layers``."""
        if self._of_spans is None:
            self._of_spans = np.zeros((len(self._written), len(self._num_tokens)), np.int64)
        for layer in layers:
            of_layer = self._of_spans[layer]
            of_layer[span] = max(of_layer[span], end)
            if np.array_equal(of_layer, self._num_tokens):
                self._written[layer] = True

    def num_written(self, layers: Sequence[int], span: int) -> int:
        """Return how many tokens of a span were written in all of ``layers``."""
        return min(self._num_written(layer, span) for layer in layers)

    def _num_written(self, layer: int, span: int) -> int:
        if self._written[layer]:
            return int(self._num_tokens[span])
        return int(self._of_spans[layer, span]) if self._of_spans is not None else 0
