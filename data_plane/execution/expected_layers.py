"""Layers that an engine is expected to send with the same tensors in every step: they are checked
and bound once, and each is then one native call without the interpreter's lock.

Bound calls serve any plan that computes as many tokens. The plan itself is checked by ``expect``,
and everything that other commands may have changed since, by each ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from data_plane.execution.layers import layer_index
from data_plane.execution.plan_runner import PlanRunner
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.kernels.backends.bound_layers import BoundLayer
from data_plane.plans.sessions import RunningPlan
from kvplane.attention_options import AttentionOptions
from kvplane.errors import PlanOutOfOrderError

Times = Sequence[tuple[float, float]]
TakeTimes = Callable[[], Times]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer of the model and its tensors, whose addresses stay the same. ``output``: receives the
    attention output, of the query's tokens and heads.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    options: AttentionOptions


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A call checked with a plan of ``num_tokens``. ``index``: the layer's in the shard."""

    index: int
    group: int
    num_tokens: int
    bound: BoundLayer


@dataclass(frozen=True, slots=True)
class ExpectedLayers:
    """The layers of one plan that are expected. ``batches``: native, one for each call."""

    session_id: int
    run: RunningPlan
    calls: Sequence[BoundCall]
    batches: Sequence[Any]
    num_threads: int
    pass_index: int | None
    """The plan's pass that they belong to."""


class Expectations:
    """Expected layers of one executor, whose ``lock`` is held while layers run."""

    def __init__(
        self,
        plans: PlanRunner,
        compute: ShardKernels,
        layers: Sequence[int],
        lock: AbstractContextManager[Any],
        observe: Callable[[str, float], None] | None,
    ) -> None:
        """``layers``: the model's layers in the shard. ``observe``: the executor's."""
        self._plans = plans
        self._compute = compute
        self._layers = layers
        self._lock = lock
        self._observe = observe

    def bind(
        self, session_id: int, plan_number: int, calls: Sequence[LayerCall]
    ) -> list[BoundCall] | None:
        """Check and bind ``calls`` with the session's latest plan. Returns None if one of them has
        to be checked whenever it comes. Raises as ``PlanRunner.latest``.
        """
        with self._lock:
            run = self._plans.latest(session_id, plan_number)[1]
            bound_calls = []
            for call in calls:
                index = layer_index(self._layers, call.layer)
                group = self._compute.group_of_layer(index)
                batch = self._plans.batch(run, group)
                bound = self._compute.bound_layer(
                    batch, index, call.query, call.key, call.value, call.options
                )
                if bound is None:
                    return None
                if call.output.shape != (batch.num_tokens, *bound.output_heads):
                    return None
                bound_calls.append(BoundCall(index, group, batch.num_tokens, bound))
            return bound_calls

    def expect(
        self,
        session_id: int,
        plan_number: int,
        pass_index: int | None,
        calls: Sequence[BoundCall],
        slice_s: float,
    ) -> ExpectedLayers | None:
        """Expect the layers of the latest plan's pass as ``calls``. Returns None if they do not fit
        it: it computes another number of tokens, a window reaches trimmed entries, or a layer takes
        longer than ``slice_s``. Raises as ``PlanRunner.present``.
        """
        compute = self._compute
        with self._lock:
            run = self._plans.present(session_id, plan_number, pass_index)[1]
            if any(compute.slices(batch.lengths, slice_s) for batch in run.attention):
                return None
            for call in calls:
                batch = self._plans.batch(run, call.group)
                if batch.num_tokens != call.num_tokens or not compute.sees(call.bound, batch):
                    return None
            batches = [compute.native_batch(self._plans.batch(run, call.group)) for call in calls]
            threads = compute.num_threads
            return ExpectedLayers(session_id, run, calls, batches, threads, run.pass_index)

    def run(
        self, expected: ExpectedLayers, first: int, serve: Callable[[], None], times: TakeTimes
    ) -> None:
        """Call ``serve``, which runs layers from number ``first`` of the calls on, for a short
        time: others wait for the lock. ``times`` returns the seconds that each layer that ran took
        to write and to attend.

        Raises what ``serve`` does, PlanOutOfOrderError if the plan or its pass has ended, and as
        ``PlanRunner.layer`` if its blocks may no longer be written or read.
        """
        with self._lock:
            number, pass_index = expected.run.number, expected.pass_index
            session, run = self._plans.present(expected.session_id, number, pass_index)
            if run is not expected.run or run.is_complete:
                raise PlanOutOfOrderError("the plan has ended", field="plan.number")
            self._plans.write_checks.check_may_write(session, run)
            try:
                serve()
            finally:
                self._note(expected, first, times())

    def _note(self, expected: ExpectedLayers, first: int, times: Times) -> None:
        run = expected.run
        for call, seconds in zip(expected.calls[first:], times, strict=False):
            num_context = run.num_context_tokens(call.bound.window_tokens)
            self._compute.count(call.bound, call.num_tokens, num_context, seconds)
            run.progress.finish_layer(call.index)
            if self._observe is not None:
                self._observe("layer", sum(seconds))
