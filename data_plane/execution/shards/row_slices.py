"""Cuts a long attention call into slices of its query rows, so that other commands can run between
them. The output is bit for bit that of the whole call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from data_plane.kernels.arguments import AttentionArguments, HostLengths

# Batches of fewer rows are decode steps, which are short.
_FEW_ROWS: Final = 256
# Slices of fewer rows would read keys and values too often.
_LEAST_ROWS: Final = 64
_FIRST_GUESS_S: Final = 1e-7
# In calls of fewer rows times positions, the fixed cost of a call dominates.
_LEAST_PAIRS: Final = 1 << 16
_MEMORY_CALLS: Final = 4


def rows_of(arguments: AttentionArguments, rows: range) -> AttentionArguments:
    """Return the attention arguments of some of the query rows. ``lengths`` must be given."""
    lengths = arguments.lengths
    assert lengths is not None
    starts = lengths.query_starts
    first = int(np.searchsorted(starts, rows.start, "right")) - 1
    end = int(np.searchsorted(starts, rows.stop, "left"))
    ends = np.minimum(starts[first + 1 : end + 1], rows.stop)
    query_starts = np.concatenate([[0], ends - rows.start])
    context_lens = lengths.context_lens[first:end] - (starts[first + 1 : end + 1] - ends)
    device = arguments.query.device
    return replace(
        arguments,
        query=arguments.query[rows.start : rows.stop],
        block_tables=arguments.block_tables[first:end],
        query_starts=torch.from_numpy(query_starts).to(device),
        context_lens=torch.from_numpy(context_lens).to(device),
        options=arguments.options.of_sequences(first, end),
        max_query_len=min(arguments.max_query_len, len(rows)),
        lengths=HostLengths(query_starts, context_lens),
        plans=None,
    )


class SliceSizes:
    """Estimates from earlier calls how long the attention of a query row takes."""

    def __init__(self) -> None:
        self._pair_s = _FIRST_GUESS_S  # for one query row and one position that it attends to

    def slices(self, lengths: HostLengths, slice_s: float) -> Iterator[range]:
        """Yield the rows of a call, in one slice or several that take about ``slice_s`` each."""
        starts, num_rows = lengths.query_starts, int(lengths.query_starts[-1])
        begin = 0
        while begin < num_rows:
            end = num_rows
            if num_rows > _FEW_ROWS:
                span = int(np.searchsorted(starts, begin, "right")) - 1
                # Row i of the slice attends to num_earlier + i positions.
                num_earlier = int(lengths.context_lens[span]) - int(starts[span + 1]) + begin
                num_pairs = slice_s / self._pair_s
                num = int(math.sqrt(num_earlier**2 + 2 * num_pairs) - num_earlier)
                end = begin + max(_LEAST_ROWS, num // _LEAST_ROWS * _LEAST_ROWS)
                end = num_rows if end + _LEAST_ROWS > num_rows else end
            yield range(begin, end)
            begin = end

    @contextmanager
    def timing(self, arguments: AttentionArguments) -> Iterator[None]:
        """Measure the attention call made inside the context, for later estimates."""
        begin_s = time.perf_counter()
        yield
        lengths = arguments.lengths
        if lengths is not None and len(arguments.query) >= _LEAST_ROWS:
            num_rows = np.diff(lengths.query_starts)
            num_pairs = int(np.dot(num_rows, lengths.context_lens - num_rows // 2))
            if num_pairs >= _LEAST_PAIRS:
                pair_s = (time.perf_counter() - begin_s) / num_pairs
                self._pair_s += (pair_s - self._pair_s) / _MEMORY_CALLS
