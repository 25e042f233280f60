"""Layers that are expected with tensors that are known beforehand, as an engine sends them step
after step: checked once, bound once, then one native call each without an interpreter's lock.

They serve any plan that computes as many tokens. What a plan changes is checked when it is
expected, and what others may have changed since, each time before layers run.
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
    """A layer of the model and its tensors, which stay where they are. ``output``: where its output
    goes, of the query's tokens and heads.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    options: AttentionOptions


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A call that a plan of ``num_tokens`` was found to allow. ``index``: in the shard."""

    index: int
    group: int
    num_tokens: int
    bound: BoundLayer


@dataclass(frozen=True, slots=True)
class ExpectedLayers:
    """The layers of one plan that may come. ``batches``: native, one for each."""

    session_id: int
    run: RunningPlan
    calls: Sequence[BoundCall]
    batches: Sequence[Any]
    num_threads: int
    pass_index: int | None
    """In which pass of the plan they come."""


class Expectations:
    """Of one executor, whose ``lock`` is held while layers run."""

    def __init__(
        self,
        plans: PlanRunner,
        compute: ShardKernels,
        layers: Sequence[int],
        lock: AbstractContextManager[Any],
        observe: Callable[[str, float], None] | None,
    ) -> None:
        """``layers``: the model's, in the shard. ``observe``: as the executor's."""
        self._plans = plans
        self._compute = compute
        self._layers = layers
        self._lock = lock
        self._observe = observe

    def bind(
        self, session_id: int, plan_number: int, calls: Sequence[LayerCall]
    ) -> list[BoundCall] | None:
        """``calls`` as the session's latest plan allows them; None where one of them has to be
        checked whenever it comes. Raises as ``PlanRunner.latest``.
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
        """Let the layers of the latest plan's pass come by ``calls``; None where they are not for
        it: it computes another number of tokens, or a layer takes longer than ``slice_s``. Raises
        as ``PlanRunner.latest``.
        """
        compute = self._compute
        with self._lock:
            run = self._plans.latest(session_id, plan_number, pass_index)[1]
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
        """Call ``serve``, which runs layers from number ``first`` of the calls on, soon and for a
        short time: others wait for the lock. ``times`` gives, of the layers that ran, the seconds
        that each took to write and to attend.

        Raises what ``serve`` does, PlanOutOfOrderError where the plan does not go on, and as
        ``PlanRunner.layer`` where its blocks may no longer be written or read.
        """
        with self._lock:
            session, run = self._plans.latest(expected.session_id, expected.run.number)
            is_same = run is expected.run and run.pass_index == expected.pass_index
            if not is_same or run.is_complete:
                raise PlanOutOfOrderError("the plan, or its pass, has ended", field="plan.number")
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
