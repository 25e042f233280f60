"""What every rank does, and how ranks agree on how it ended.

    load ──► open ──► start ──► forward, unless the plan computes nothing ──► close

Rank 0 tells each command to all ranks. All do it, and say how that ended; when one of them failed,
rank 0 raises its error. In a forward pass ranks wait for each other in every layer, so one that
fails goes on with zeros, and says so at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.models import loader
from engine.parallel.backends import backend_of
from engine.parallel.group import RankGroup
from engine.parallel.model_part import keep_part
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError, KvplaneError
from kvplane.layout import Layout
from kvplane.sync.loop_thread import LoopThread
from kvplane.transformers.backend import DataBackend
from kvplane.transformers.models.packed import packed_logits
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb
from kvplane.v1.data_pb2 import ExecuteResponse, PlanStarted
from kvplane.wire.error_messages import from_wire, to_wire

_LOGGER: Final = logging.getLogger(__name__)

# What a command's message begins with.
LOAD: Final = b"L"
OPEN: Final = b"O"
START: Final = b"S"
FORWARD: Final = b"F"
CLOSE: Final = b"C"
STOP: Final = b"Q"


@dataclass(frozen=True, slots=True)
class SharedSession:
    """What ranks must know of a session that rank 0 opened."""

    grant: tpb.SignedPayload
    shards: Sequence[cpb.ShardInfo]
    layout: Layout

    def encode(self) -> bytes:
        """For ``decode`` of another rank."""
        return cpb.OpenSessionResponse(
            grant=self.grant, shards=self.shards, layout=self.layout.to_proto()
        ).SerializeToString()

    @classmethod
    def decode(cls, message: bytes) -> SharedSession:
        """The inverse of ``encode``."""
        response = cpb.OpenSessionResponse.FromString(message)
        return cls(response.grant, list(response.shards), Layout.from_proto(response.layout))


class PatientStep:
    """The layers of one forward pass. After one that failed the others give zeros, and ``finish``
    raises its error.
    """

    def __init__(self, backend: DataBackend) -> None:
        self._backend = backend
        self._error: KvplaneError | None = None

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """As ``kvplane.transformers.attention.Step.layer``."""
        if self._error is None:
            try:
                return self._backend.layer(index, query, key, value, options=options)
            except KvplaneError as error:
                self._error = error
        return query.new_zeros(*query.shape[:2], value.shape[-1])

    def finish(self) -> ExecuteResponse:
        """The receipt of this rank."""
        if self._error is not None:
            raise self._error
        return ExecuteResponse(receipt=self._backend.finish()[0])


def together(group: RankGroup, act: Callable[[], ExecuteResponse | None]) -> list[ExecuteResponse]:
    """Do this rank's part of a command; what all of them answer, by rank. Raises the error of the
    first that failed.
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


def start(backend: DataBackend, plan: tpb.SignedPayload) -> ExecuteResponse:
    """Start a plan on this rank: how many tokens it computes, or its receipt."""
    started = backend.start(plan)
    if started.receipts:
        return ExecuteResponse(receipt=started.receipts[0])
    return ExecuteResponse(started=PlanStarted(num_tokens=started.num_tokens))


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a rank other than 0 has to know. ``meeting``: see ``RankGroup``."""

    config: EngineConfig
    meeting: Path
    rank: int


def follow(assignment: Assignment) -> None:
    """Do what rank 0 tells, until it says to stop. Raises InternalError when it has ended."""
    config = assignment.config
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    group = RankGroup(
        assignment.meeting, assignment.rank, config.tensor_parallel, config.recovery_timeout_s
    )
    loop = LoopThread("engine-planes")
    follower = _Follower(config, group, loop)
    try:
        _agree(group, follower.begin)
        while (message := group.tell())[:1] != STOP:
            _agree(group, lambda: follower.do(message[:1], message[1:]))
    finally:
        follower.close()
        loop.close()


def _agree(group: RankGroup, act: Callable[[], ExecuteResponse | None]) -> None:
    """``together`` for ranks that leave it to rank 0 to act on an error."""
    try:
        together(group, act)
    except KvplaneError as error:
        _LOGGER.warning("rank=%d reason=%s: %s", group.rank, error.reason, error.message)


class _Follower:
    """Its model and its backend."""

    def __init__(self, config: EngineConfig, group: RankGroup, loop: LoopThread) -> None:
        self._config = config
        self._group = group
        self._loop = loop
        self._backend: DataBackend | None = None
        self._model: PreTrainedModel | None = None

    def begin(self) -> None:
        self._backend = backend_of(self._config, self._loop, self._group.rank)

    def do(self, kind: bytes, body: bytes) -> ExecuteResponse | None:
        backend = self._backend
        assert backend is not None
        if kind == LOAD:
            layout = Layout.from_proto(tpb.Layout.FromString(body))
            model = loader.load(self._config.model, layout.dtype, probe=False).model
            keep_part(model, layout, self._group)
            self._model = model
        elif kind == OPEN:
            backend.open(SharedSession.decode(body))
        elif kind == START:
            return start(backend, tpb.SignedPayload.FromString(body))
        elif kind == FORWARD:
            return self._forward(backend, body)
        elif kind == CLOSE:
            backend.close()
        return None

    def close(self) -> None:
        if self._backend is not None:
            self._backend.stop()

    def _forward(self, backend: DataBackend, body: bytes) -> ExecuteResponse:
        assert self._model is not None
        tokens, positions = torch.frombuffer(bytearray(body), dtype=torch.int64).view(2, -1)
        step = PatientStep(backend)
        packed_logits(self._model, tokens.tolist(), positions.tolist(), [], step)
        return step.finish()
