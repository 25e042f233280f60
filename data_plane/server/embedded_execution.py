"""An execution in the data plane's process, with the calls of ``kvplane.sync.Execution``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from data_plane.execution.executor import Executor
from data_plane.execution.fixed_step import FixedStep
from data_plane.execution.table_blocks import BlockRange
from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.plans.batches.fixed_rows import StepBounds
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError, InvalidRequestError
from kvplane.results import Signed
from kvplane.wire.v1.types_pb2 import SignedPayload


class EmbeddedExecution:
    """Runs the plans of one session, in the caller's thread. One call at a time: ``start``, then
    ``layer`` for each of ``layers``. Tensors are torch's, on the executor's device.

    ``layers``: the layers held, ascending. ``num_tokens``: tokens that the plan or pass started
    last computes. ``receipts``: one, once the plan started last has run and was asked for it.
    """

    def __init__(
        self,
        executor: Executor,
        grant: Signed,
        *,
        take_receipt: Callable[[Signed], None] | None = None,
    ) -> None:
        """``take_receipt`` gets each plan's receipt once; the last layer then waits until the plan
        or pass has run. Without it the caller asks for the receipt by ``finish``.
        """
        self.layers = list(executor.layers)
        self.latent_layers = executor.layout.latent_layers
        self.num_tokens = 0
        self.receipts: list[Signed] = []
        self._executor = executor
        self._give_receipt = take_receipt
        self._session_id = executor.open(cast(SignedPayload, grant))
        self._plan: Signed | None = None
        self._plan_number = 0
        self._pass_index: int | None = None
        self._last_given = 0  # number of the plan whose receipt was given
        self._step: ExecutionStep | None = None

    def __enter__(self) -> EmbeddedExecution:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def has_run(self) -> bool:
        """Return whether the plan started last has its receipt: no layer is expected any more."""
        return bool(self.receipts)

    def start(self, plan: Signed | None, *, pass_index: int | None = None) -> None:
        """Start a plan, and begin a pass of it if one is given: see ``Executor.start`` and
        ``Executor.begin_pass``. Raises InvalidRequestError for None, the plan of a step that
        changed nothing.
        """
        if plan is None:
            raise InvalidRequestError("is None: the step has nothing to carry out", field="plan")
        self._pass_index = pass_index
        if not pass_index or plan is not self._plan:
            self.receipts = []
            started = self._executor.start(self._session_id, cast(SignedPayload, plan))
            self._plan, self._plan_number = plan, started.number
            self.num_tokens = started.num_tokens
            self._take(started.receipt)
        if pass_index is not None:
            self.num_tokens = self._executor.begin_pass(
                self._session_id, pass_index, plan_number=self._plan_number
            )

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions = AttentionOptions(),
    ) -> torch.Tensor:
        """Write one layer's keys and values, then attend: see ``Executor.layer``."""
        output = self._executor.layer(
            self._session_id,
            index,
            query,
            key,
            value,
            options=options,
            plan_number=self._plan_number,
            pass_index=self._pass_index,
        )
        if output is None:
            raise InternalError("a layer with queries has no output")
        if self._give_receipt is not None and index == self.layers[-1]:
            self.finish()
        return output

    def fixed_step(self, bounds: StepBounds) -> ExecutionStep:
        """Return the execution's step for CUDA graphs, made at the first call. Raises as
        ``Executor.fixed_step``.
        """
        if self._step is None:
            fixed = self._executor.fixed_step(self._session_id, bounds)
            self._step = ExecutionStep(self, fixed)
        return self._step

    def run_step(self, step: FixedStep, call: Callable[[], object], num_tokens: int) -> None:
        """Run the plan or pass started last by a step: see ``FixedStep.run``."""
        number, index = self._plan_number, self._pass_index
        step.run(call, plan_number=number, pass_index=index, num_tokens=num_tokens)

    def finish(self) -> Sequence[Signed]:
        """Return the receipt of the plan, if it has run. On a GPU, waits until it has."""
        self._take(self._executor.receipt(self._session_id))
        return self.receipts

    def read_states(self, sequence_ids: Sequence[int], entries: Sequence[int]) -> torch.Tensor:
        """Read checkpoints of this shard: see ``DataBackend.read_states``."""
        group = self._state_group()
        read = [
            self._executor.read_blocks(self._session_id, sequence_id, [entry], group=group)[0]
            for sequence_id, entry in zip(sequence_ids, entries, strict=True)
        ]
        with device_errors():
            return torch.cat(read, dim=1)

    def write_states(
        self, sequence_ids: Sequence[int], entries: Sequence[int], states: torch.Tensor
    ) -> None:
        """Write checkpoints of the plan started last: see ``DataBackend.write_states``."""
        group = self._state_group()
        places = [
            BlockRange(sequence_id, entry, 1, group)
            for sequence_id, entry in zip(sequence_ids, entries, strict=True)
        ]
        with device_errors():
            there = states.to(self._executor.device)
        receipt = self._executor.blocks.write(self._session_id, places, there, self._plan_number)
        self._take(receipt)

    def _state_group(self) -> int:
        group = self._executor.layout.state_group
        if group is None:
            raise InvalidRequestError("has no group of states", field="layout")
        return group

    def close(self) -> None:
        """Stop running the plan here. Another execution can continue it."""
        self._plan, self._plan_number, self.num_tokens, self.receipts = None, 0, 0, []

    def _take(self, receipt: Signed | None) -> None:
        if receipt is None:
            return
        self.receipts = [receipt]
        if self._give_receipt is not None and self._plan_number != self._last_given:
            self._last_given = self._plan_number
            self._give_receipt(receipt)


class ExecutionStep:
    """A fixed step of an execution. Its layers can be captured in a CUDA graph: it is a
    ``kvplane.transformers.attention.Step``, for pools that keep no latents.
    """

    latent_layers: frozenset[int] = frozenset()

    def __init__(self, execution: EmbeddedExecution, step: FixedStep) -> None:
        self._execution = execution
        self._step = step

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions = AttentionOptions(),
    ) -> torch.Tensor:
        """Queue a layer: see ``FixedStep.layer``."""
        assert value is not None, "a GPU's pool keeps no latents"
        return self._step.layer(index, query, key, value, options=options)

    def run(self, call: Callable[[], object], *, num_tokens: int) -> None:
        """Run the plan or pass that the execution started last: see ``FixedStep.run``."""
        self._execution.run_step(self._step, call, num_tokens)
