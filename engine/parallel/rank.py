"""The commands that every rank runs, and how ranks agree on the outcome.

    begin ──► open ──► start ──► forward, unless the plan computes nothing ──► close

Rank 0 sends each command to all ranks. All run it and report the outcome; if one failed, rank 0
raises its error. In a forward pass ranks wait for each other in every layer, so one that fails
continues with zeros, and reports the error at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast

import torch
from transformers import PreTrainedModel

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError, KvplaneError
from kvplane.layout import Layout
from kvplane.results import Signed, read_signed
from kvplane.runtime.backend import DataBackend
from kvplane.sync.loop_thread import LoopThread
from kvplane.transformers.models.packed import packed_logits
from kvplane.wire.error_messages import from_wire, to_wire
from kvplane.wire.v1.execution_pb2 import ExecuteResponse, RunLayerResponse, StartPlanResponse
from kvplane.wire.v1.types_pb2 import SignedPayload

from ..config import EngineSettings
from ..models import loader
from .backends import SharedSession, backend_of, device_of, group_of
from .group import RankGroup
from .model_part import keep_part

_LOGGER: Final = logging.getLogger(__name__)

# The first byte of a command's message.
OPEN: Final = b"O"
START: Final = b"S"
FORWARD: Final = b"F"
CLOSE: Final = b"C"
STOP: Final = b"Q"


class DeferredErrorStep:
    """Runs the layers of one forward pass on this rank. After a layer that failed the others return
    zeros, and ``finish`` raises its error.
    """

    def __init__(self, backend: DataBackend) -> None:
        self._backend = backend
        self._error: KvplaneError | None = None

    @property
    def latent_layers(self) -> frozenset[int]:
        """The layers of the backend that keep latents."""
        return self._backend.latent_layers

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Compute a layer, as ``kvplane.transformers.attention.Step.layer`` does."""
        assert value is not None, "keep_part refuses latents"
        if self._error is None:
            try:
                return self._backend.layer(index, query, key, value, options=options)
            except KvplaneError as error:
                self._error = error
        return query.new_zeros(*query.shape[:2], value.shape[-1])

    def finish(self) -> ExecuteResponse:
        """Return the receipt of this rank."""
        if self._error is not None:
            raise self._error
        receipt = cast(SignedPayload, self._backend.finish()[0])
        return ExecuteResponse(output=RunLayerResponse(receipt=receipt))


def together(group: RankGroup, act: Callable[[], ExecuteResponse | None]) -> list[ExecuteResponse]:
    """Run this rank's part of a command; returns the answers of all ranks, by rank. Raises the
    error of the first rank that failed.
    """
    try:
        own = act() or ExecuteResponse()
    except KvplaneError as error:
        own = ExecuteResponse(error=to_wire(error))
    except Exception as error:  # a bug; the others wait for an answer
        _LOGGER.exception("rank %d failed", group.rank)
        text = f"rank {group.rank} failed: {type(error).__name__}: {error}"
        own = ExecuteResponse(error=to_wire(InternalError(text)))
    messages = group.gather(own.SerializeToString())
    answers = [ExecuteResponse.FromString(message) for message in messages]
    for answer in answers:
        if answer.HasField("error"):
            raise from_wire(answer.error)
    return answers


def start(backend: DataBackend, plan: Signed) -> ExecuteResponse:
    """Start a plan on this rank; returns how many tokens it computes, or its receipt."""
    started = backend.start(plan)
    receipt = cast(SignedPayload, started.receipts[0]) if started.receipts else None
    response = StartPlanResponse(num_tokens=started.num_tokens, receipt=receipt)
    return ExecuteResponse(started=response)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Tells another rank how to start; rank 0 sends it. ``meeting``: see ``RankGroup``."""

    config: EngineSettings
    layout: Layout
    meeting: Path
    rank: int


def follow(assignment: Assignment) -> None:
    """Run rank 0's commands on this rank until a stop. Raises InternalError if rank 0 ended."""
    config = assignment.config
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    group = group_of(config, assignment.meeting, assignment.rank)
    with _RankWorker(assignment, group) as worker:
        _agree(group, worker.begin)
        while (message := group.tell())[:1] != STOP:
            _agree(group, partial(worker.do, message[:1], message[1:]))


def _agree(group: RankGroup, act: Callable[[], ExecuteResponse | None]) -> None:
    """Run ``together`` on a rank other than 0, which only logs an error: rank 0 raises it."""
    try:
        together(group, act)
    except KvplaneError as error:
        _LOGGER.warning("rank=%d reason=%s: %s", group.rank, error.reason, error.message)


class _RankWorker:
    """A rank other than 0: its part of the model, and its backend."""

    _backend: DataBackend
    _model: PreTrainedModel

    def __init__(self, assignment: Assignment, group: RankGroup) -> None:
        self._assignment = assignment
        self._group = group
        self._closing = ExitStack()

    def __enter__(self) -> _RankWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def begin(self) -> None:
        """Load this rank's part of the model, which rank 0 has probed, and its backend."""
        config, layout = self._assignment.config, self._assignment.layout
        loop = LoopThread("engine-planes")
        self._closing.callback(loop.close)
        self._model = loader.load(
            config.model, layout.dtype, probe=False, max_total_tokens=config.max_total_tokens
        ).model
        keep_part(self._model, layout, self._group)
        # Only the part need fit there.
        loader.move(self._model, device_of(config, self._group.rank))
        self._backend = backend_of(config, layout, loop, self._model, self._group.rank)
        self._closing.callback(self._backend.stop)

    def do(self, kind: bytes, body: bytes) -> ExecuteResponse | None:
        """Run one command of rank 0."""
        if kind == OPEN:
            self._backend.open(SharedSession.decode(body, self._assignment.layout))
        elif kind == START:
            return start(self._backend, read_signed(body))
        elif kind == FORWARD:
            tokens, positions = torch.frombuffer(bytearray(body), dtype=torch.int64).view(2, -1)
            step = DeferredErrorStep(self._backend)
            packed_logits(self._model, tokens.tolist(), positions.tolist(), [], step)
            return step.finish()
        elif kind == CLOSE:
            self._backend.close()
        return None
