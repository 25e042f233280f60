"""Decode steps on a GPU, each of which replays a CUDA graph of the whole model.

    first step of a size   once by layers, which allocates, then captured
    each step              ids and positions ──► the graph's inputs, then
                           the plan's rows ──► the fixed step's buffers, replay ──► logits

There is a graph for each of some batch sizes, and a step is padded to the next one: padding has
no rows, so that it writes nothing. Steps with more than one token of a sequence run by layers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.transformers import attention
from kvplane.transformers.models.packed import packed_logits

if TYPE_CHECKING:  # an engine whose pool is elsewhere needs no data plane
    from data_plane.server.embedded_execution import ExecutionStep
    from kvplane.runtime.embedded import EmbeddedBackend

_log = logging.getLogger("engine")


def sizes_of(max_sequences: int) -> list[int]:
    """Return the batch sizes for which steps are captured, ascending: 1, 2, 4, 8, 16, 24, 32, 48,
    64, 96 and so on, and ``max_sequences``.
    """
    powers = range(3, max_sequences.bit_length() + 1)
    sizes = {1, 2, 4, 8} | {factor << power for factor in (2, 3) for power in powers}
    return [*sorted(size for size in sizes if size < max_sequences), max_sequences]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph with its tensors, which stay where they are: ``inputs``, int64 [2, size], the ids and
    positions of its tokens; ``logits``, [size, vocabulary], in the model's type.
    """

    size: int
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    logits: torch.Tensor


class CapturedDecoder:
    """Computes one token of each sequence of a batch. ``num_captures``, ``num_replays``: so far.

    Graphs are of one session: the first step of another one drops them. A model that cannot be
    captured, as one that waits for the GPU, is logged once and runs by layers.
    """

    def __init__(
        self, model: PreTrainedModel, backend: EmbeddedBackend, max_sequences: int, max_tokens: int
    ) -> None:
        """``max_tokens``: of a sequence. ``backend``: its pool is on the model's GPU."""
        self._model = model
        self._backend = backend
        self._sizes = sizes_of(max_sequences)
        self._max_tokens = max_tokens
        self._memory = torch.cuda.graph_pool_handle()  # all graphs share it: one runs at a time
        self._step: ExecutionStep | None = None
        self._captured: dict[int, _Captured] = {}
        self._is_refused = False
        self.num_captures = 0
        self.num_replays = 0

    def logits(
        self, tokens: Sequence[int], positions: Sequence[int], step: attention.Step
    ) -> torch.Tensor:
        """Compute float32 logits [sequences, vocabulary] after a token of each, on the GPU. Without
        a graph for them, ``step`` computes them by layers.
        """
        captured = self._captured_for(len(tokens))
        found = None if captured is None else self._replay(captured, tokens, positions)
        if found is None:
            return packed_logits(self._model, tokens, positions, range(len(tokens)), step)
        return found

    @torch.inference_mode()
    def _replay(
        self, captured: _Captured, tokens: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor | None:
        """Replay a graph. Returns None where the plan does not fit the step's buffers."""
        assert self._step is not None, "it was made before the graph"
        num_tokens = len(tokens)
        # Pinned, so that the copy waits for nothing; new, as the last one may still be read.
        host = torch.zeros((2, captured.size), dtype=torch.int64, pin_memory=True)
        host[:, :num_tokens] = torch.tensor([tokens, positions])
        captured.inputs.copy_(host, non_blocking=True)
        try:
            with torch.cuda.device(self._model.device):
                self._step.run(captured.graph.replay, num_tokens=captured.size)
        except InvalidRequestError as error:
            if not error.field.startswith("bounds."):
                raise
            return None
        self.num_replays += 1
        # A copy: the next replay overwrites the graph's.
        return captured.logits[:num_tokens].to(torch.float32, copy=True)

    def _captured_for(self, num_tokens: int) -> _Captured | None:
        """Return the graph for ``num_tokens``, capturing it if needed; None if it cannot be."""
        if self._is_refused:
            return None
        try:
            step = self._backend.fixed_step(self._sizes[-1], self._max_tokens)
            if step is not self._step:
                self._step, self._captured = step, {}
            size = next(size for size in self._sizes if size >= num_tokens)
            if size not in self._captured:
                self._captured[size] = self._capture(step, size)
            return self._captured[size]
        except Exception as error:  # the model's own code may raise anything
            is_of_planes = isinstance(error, KvplaneError)
            if is_of_planes and not isinstance(error, InvalidRequestError):
                raise  # such as a session that has ended, from which the engine recovers
            self._is_refused = True
            self._step, self._captured = None, {}
            _log.warning(
                "decode steps are not captured, they run by layers: %s: %s",
                type(error).__name__,
                error,
            )
            return None

    @torch.inference_mode()
    def _capture(self, step: ExecutionStep, size: int) -> _Captured:
        began_s = time.monotonic()
        inputs = torch.zeros((2, size), dtype=torch.int64, device=self._model.device)

        def forward() -> torch.Tensor:
            with attention.running(step, self._model):
                output = self._model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False)
            logits: torch.Tensor = output.logits[0]
            return logits

        with torch.cuda.device(self._model.device):
            forward()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # The plane's own threads use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                logits = forward()
        self.num_captures += 1
        _log.info("captured sequences=%d seconds=%.1f", size, time.monotonic() - began_s)
        return _Captured(size, graph, inputs, logits)
