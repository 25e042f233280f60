"""Rank 0: the engine itself, whose backend forwards each call to all ranks."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError, KvplaneError
from kvplane.layout import Layout
from kvplane.results import Signed
from kvplane.runtime.backend import DataBackend, OpenedSession, PlanStarted
from kvplane.sync.loop_thread import LoopThread

from ..config import EngineSettings
from ..models import loader
from . import rank as ranks
from .backends import SharedSession, backend_of, device_of, group_of
from .model_part import keep_part

_END_TIMEOUT_S: Final = 10.0


class ParallelBackend:
    """Rank 0's backend: starts the other ranks, and forwards each call to them. Raises
    InternalError once a rank has ended: the engine must then be started again.
    """

    def __init__(
        self, config: EngineSettings, layout: Layout, loop: LoopThread, model: PreTrainedModel
    ) -> None:
        """``model``: the whole model, which is cut to this rank's part. Raises what ``keep_part``
        and ``backend_of`` raise on any rank.
        """
        self._own: DataBackend | None = None
        self._step: ranks.DeferredErrorStep | None = None  # of a forward pass that has begun
        self._closing = ExitStack()
        with self._closing:
            meeting = Path(self._closing.enter_context(tempfile.TemporaryDirectory()), "meeting")
            for rank in range(1, config.tensor_parallel):
                self._start_rank(ranks.Assignment(config, layout, meeting, rank))
            self._group = group_of(config, meeting)
            self._closing.callback(self._stop_others)

            def begin() -> None:
                keep_part(model, layout, self._group)
                loader.move(model, device_of(config))  # only the part need fit there
                self._own = backend_of(config, layout, loop, model)
                self._closing.callback(self._own.stop)

            ranks.together(self._group, begin)
            model.register_forward_pre_hook(self._share_batch, with_kwargs=True)
            self._closing = self._closing.pop_all()

    @property
    def latent_layers(self) -> frozenset[int]:
        """The layers of this rank that keep latents."""
        return self._backend.latent_layers

    def open(self, session: OpenedSession) -> None:
        """Open the session on all ranks."""
        shared = SharedSession(session.grant, session.shards, session.layout)
        self._tell(ranks.OPEN + shared.encode())
        ranks.together(self._group, lambda: self._backend.open(shared))

    has_passes = False

    def start(
        self, plan: Signed, num_tokens: int = 0, pass_index: int | None = None
    ) -> PlanStarted:
        """Start a plan on all ranks."""
        self._tell(ranks.START + plan.SerializeToString())
        answers = ranks.together(self._group, lambda: ranks.start(self._backend, plan))
        has_run = all(answer.started.HasField("receipt") for answer in answers)
        receipts = [answer.started.receipt for answer in answers] if has_run else []
        return PlanStarted(max(answer.started.num_tokens for answer in answers), receipts)

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write and attend in one layer with this rank's heads."""
        if self._step is None:
            raise InternalError("no forward pass has begun")
        return self._step.layer(index, query, key, value, options=options)

    def finish(self, *, is_last: bool = True) -> Sequence[Signed]:
        """Return the receipts of all ranks, after the last layer."""
        step, self._step = self._step, None
        if step is None:
            raise InternalError("no forward pass has begun")
        return [answer.output.receipt for answer in ranks.together(self._group, step.finish)]

    def read_states(self, sequence_ids: Sequence[int], entries: Sequence[int]) -> torch.Tensor:
        """Raise InternalError: ``keep_part`` refuses models with states."""
        raise InternalError("ranks keep no states")

    def write_states(
        self, sequence_ids: Sequence[int], entries: Sequence[int], states: torch.Tensor
    ) -> None:
        """Raise as ``read_states`` does."""
        self.read_states(sequence_ids, entries)

    def close(self) -> None:
        """Close the session on all ranks."""
        self._tell(ranks.CLOSE)
        ranks.together(self._group, lambda: self._backend.close())

    def stop(self) -> None:
        """Stop all ranks. Harmless when called again."""
        self._closing.close()

    @property
    def _backend(self) -> DataBackend:
        if self._own is None:
            raise InternalError("it was stopped")
        return self._own

    def _start_rank(self, assignment: ranks.Assignment) -> None:
        command = [sys.executable, "-m", f"{__package__}.worker"]
        # In a session of its own: an interrupt at the terminal is for this process, which stops it.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._closing.callback(_end, process)
        assert process.stdin is not None
        with process.stdin:
            pickle.dump(assignment, process.stdin)

    def _stop_others(self) -> None:
        with suppress(KvplaneError):  # those that have ended need no message
            self._group.tell(ranks.STOP)

    def _tell(self, message: bytes) -> None:
        if self._step is not None:
            raise InternalError("a forward pass was interrupted: start the engine again")
        self._group.tell(message)

    def _share_batch(self, _: Any, __: Any, arguments: dict[str, Any]) -> None:
        """Send the batch to the other ranks, so that they begin the same forward pass."""
        batch = torch.cat([arguments["input_ids"], arguments["position_ids"]])
        self._tell(ranks.FORWARD + batch.cpu().numpy().tobytes())
        self._step = ranks.DeferredErrorStep(self._backend)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
