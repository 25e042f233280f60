"""Runs layers of plans: every layer, from every caller, goes through ``LayerRunner``.

    gRPC message ─┐
    bound layer  ─┤  local socket       check_may_run ──► the layer's binding ──► kernels
    tensors      ─┤  embedded engine
    CUDA graph   ─┘  fixed step, all layers of a plan at once

``PlanRunner.check_may_run`` alone says whether a layer may run now. Which tensors it may have is
checked when the layer is bound: a layer that was called with tensors like these before is run
without more checks. Kernels that bind no layers check the arguments of each call.

``LayerRunner`` is thread-safe: each layer that it runs is a command of the executor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch

from data_plane.execution.commands import Commands
from data_plane.execution.layers import layer_index
from data_plane.execution.plan_runner import PlanLayer, PlanRunner
from data_plane.execution.shards.row_slices import rows_of
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.kernels.arguments import AttentionArguments, NumbersOfHeads, WriteArguments
from data_plane.kernels.backends.bound_layers import (
    BoundLayer,
    HostLayers,
    LayerTensors,
    of_tokens,
)
from data_plane.kernels.backends.cuda import StepMemory
from data_plane.kernels.step_rows import StepRows
from data_plane.plans.batches.attention_batch import AttentionBatch
from data_plane.plans.sessions import RunningPlan
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError, PlanOutOfOrderError
from kvplane.slices import Slices, guarded

SLICE_S: Final = 0.01
"""Seconds for which a long layer occupies the thread before other commands may run."""

Result = TypeVar("Result")


class RanLayer(NamedTuple):
    """A layer of the model that native code ran. ``seconds``: of writing, and of attending."""

    layer: int
    bound: BoundLayer
    seconds: Sequence[float]


ServeLayers = Callable[[Sequence[Any], int, int, int], None]
"""Function that runs bound layers in native code, for a short time. Arguments: native batches of
the layer groups; the first layer's index, and that of the first layer that must not run; threads.
"""


class LayerRunner:
    """Runs the layers of all sessions of one executor."""

    def __init__(
        self,
        plans: PlanRunner,
        compute: ShardKernels,
        layers: Sequence[int],
        command: Commands,
    ) -> None:
        """``layers``: the model's layers in the shard. ``command``: wraps methods in commands."""
        self.slice_s = SLICE_S
        self._plans = plans
        self._compute = compute
        self._bound = compute.bound
        self._layers = layers
        self._command = command

    def run(
        self,
        named: PlanLayer,
        tensors: LayerTensors,
        options: AttentionOptions,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Write a layer of the session's latest plan that was not written yet, if there is a key,
        and attend if there is a query. See ``Executor.layer``.

        ``out`` receives the output: contiguous and apart from the tensors; None for new memory.
        Raises the same errors as ``PlanRunner.check_may_run``, and InvalidRequestError.
        """
        with self._command.lock, self._command("layer"):
            return self._run(named, tensors, options, out)

    def run_slices(
        self,
        named: PlanLayer,
        tensors: LayerTensors,
        options: AttentionOptions,
        out: torch.Tensor | None = None,
    ) -> Slices[torch.Tensor | None]:
        """Run a layer as ``run`` does, but attend in slices of about ``SLICE_S``. The layer counts
        as written when its attention begins. Raises the same errors as ``run`` in each slice.
        """
        slices = self._slices(named, tensors, options, out)
        return guarded(slices, self._command.lock, lambda: self._command("layer"))

    def _run(
        self,
        named: PlanLayer,
        tensors: LayerTensors,
        options: AttentionOptions,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        compute = self._compute
        query, key, _ = tensors
        if key is None:
            _check_given(tensors, named.field)
        index = layer_index(self._layers, named.layer, named.field)
        run, may_write = self._plans.check_may_run(
            named, index, writes=key is not None, attends=query is not None
        )
        batch = self._plans.batch(run, compute.group_of_layer(index))
        if may_write and query is not None and self._bound is not None:
            bound = self._bound.find(batch, index, tensors, options, out)
            if bound is None and query.dim() == 4:
                tensors = _of_tokens(tensors)
                bound = self._bound.find(batch, index, tensors, options, out)
            if bound is not None:
                attended = compute.run(bound, run, batch, tensors, out)
                run.progress.finish_layer(index)
                return _like(query, attended)
        to_write, to_attend = self._check(batch, index, _of_tokens(tensors), options, named.field)
        if may_write and to_write is not None:
            compute.write(to_write)
        output = None
        if to_attend is not None:
            num_context = run.num_context_tokens(to_attend.options.sliding_window_tokens)
            output = _like(query, compute.attend(to_attend, num_context, out))
        if to_write is not None:
            run.progress.finish_layer(index)
        return output

    def _slices(
        self,
        named: PlanLayer,
        tensors: LayerTensors,
        options: AttentionOptions,
        out: torch.Tensor | None,
    ) -> Slices[torch.Tensor | None]:
        query, key, value = tensors
        _check_given(tensors, named.field)
        index, latest, batch = self._find(named)
        compute = self._compute
        slices = compute.slices(batch.lengths, self.slice_s) if query is not None else []
        if not slices:
            return self._run(named, tensors, options, out)
        _, attention = self._check(batch, index, tensors, options, named.field)
        assert attention is not None
        if key is not None:
            self._run(named, (None, key, value), options)
        output = out
        if output is None:
            output = torch.empty(attention.output_shape, dtype=attention.query.dtype)
        num_context = latest.num_context_tokens(attention.options.sliding_window_tokens)
        for rows in slices:
            if rows.start:
                yield
            self._plans.check_may_run(named, index, writes=False, attends=True)
            output[rows.start : rows.stop] = compute.attend(
                rows_of(attention, rows), num_context * len(rows) // len(output)
            )
        return output

    def bind(
        self, named: PlanLayer, tensors: LayerTensors, options: AttentionOptions
    ) -> BoundLayer | None:
        """Check a layer's tensors and options for plans and passes of as many tokens as the
        session's present one, and bind it. Returns None where native code cannot run layers
        without Python, and for a layer that does not both write and attend. Raises as
        ``PlanRunner.latest``, and InvalidRequestError.
        """
        query, key, _ = tensors
        with self._command.lock, self._command("bind_layer"):
            index, _, batch = self._find(named)
            if query is None or key is None:
                return None
            self._check(batch, index, tensors, options, named.field)
            if not isinstance(self._bound, HostLayers):
                return None
            return self._bound.find(batch, index, tensors, options, None)

    def queue(
        self,
        rows: StepRows,
        memory: StepMemory,
        index: int,
        tensors: LayerTensors,
        options: AttentionOptions,
        of_heads: NumbersOfHeads,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Queue a layer, by its index in the shard, over ``rows`` of a step that ``run_all`` runs,
        with ``memory`` at fixed addresses: both kernels can be captured. Does not wait for the
        device. ``of_heads``: as in ``AttentionArguments``. Raises InvalidRequestError.
        """
        to_write, to_attend = self._check(rows, index, tensors, options, "", of_heads)
        assert to_write is not None and to_attend is not None
        return self._compute.queue(memory, to_write, to_attend, out)

    def run_all(
        self,
        session_id: int,
        plan_number: int,
        pass_index: int | None,
        queue: Callable[[RunningPlan], Result],
    ) -> Result:
        """Let ``queue`` queue all layers of a plan or pass, as a captured step does, and return
        what it returns. Raises PlanOutOfOrderError if the plan has run, as
        ``PlanRunner.check_may_run``, and what ``queue`` does: the layers can then be run again.
        """
        with self._command.lock, self._command("step"):
            first = PlanLayer(session_id, self._layers[0], plan_number, pass_index)
            run, may_write = self._plans.check_may_run(first, 0, writes=True, attends=True)
            if not may_write:
                raise PlanOutOfOrderError(
                    f"plan {run.number} has run: start the next one", field="plan.number"
                )
            result = queue(run)
            for index in range(len(self._layers)):
                run.progress.finish_layer(index)
            self._compute.count_step(run.on_host[0].num_tokens, len(self._layers))
        return result

    def serve(
        self,
        named: PlanLayer,
        serve: ServeLayers,
        take_ran: Callable[[], Sequence[RanLayer]],
    ) -> None:
        """Let native code run bound layers from ``named`` on. ``serve`` runs them, and ``take_ran``
        returns those that ran, each of which counts as a command. It may run none of a plan that
        has run or that has to be cut into slices, and no last layer, which is followed by a
        receipt. Raises the same errors as ``PlanRunner.check_may_run``, and what ``serve`` does.
        """
        with self._command.lock:
            ran = self._serve(named, serve, take_ran)
        observe = self._command.observe
        if observe is not None:
            for each in ran:
                observe("layer", sum(each.seconds))

    def _serve(
        self,
        named: PlanLayer,
        serve: ServeLayers,
        take_ran: Callable[[], Sequence[RanLayer]],
    ) -> Sequence[RanLayer]:
        index, end = layer_index(self._layers, named.layer), len(self._layers) - 1
        if index >= end or not isinstance(self._bound, HostLayers):
            return ()
        plans, compute = self._plans, self._compute
        run, may_write = plans.check_may_run(named, index, writes=True, attends=True)
        batches = [plans.batch(run, group) for group in range(len(run.attention))]
        if not may_write or any(compute.slices(batch.lengths, self.slice_s) for batch in batches):
            return ()
        try:
            serve([*map(self._bound.batch, batches)], index, end, self._bound.num_threads)
        finally:
            ran = take_ran()
            for each in ran:
                compute.count(each.bound, run, each.seconds)
                run.progress.finish_layer(self._layers.index(each.layer))
        return ran

    def _find(self, named: PlanLayer) -> tuple[int, RunningPlan, AttentionBatch]:
        """Return a layer's index, the session's latest plan and the batch of the layer's group."""
        index, field = layer_index(self._layers, named.layer, named.field), named.field
        _, run = self._plans.latest(named.session_id, named.plan_number, f"{field}plan_number")
        return index, run, self._plans.batch(run, self._compute.group_of_layer(index))

    def _check(
        self,
        rows: StepRows,
        index: int,
        tensors: LayerTensors,
        options: AttentionOptions,
        field: str,
        of_heads: NumbersOfHeads | None = None,
    ) -> tuple[WriteArguments | None, AttentionArguments | None]:
        """Check the tensors, [num_tokens, heads, size], of the shard's layer ``index``, and bind
        the layer for tensors like these if it both writes and attends. ``of_heads``: as in
        ``AttentionArguments``. Raises InvalidRequestError naming a field after ``field``.
        """
        compute, (query, key, value) = self._compute, tensors
        to_write = to_attend = None
        if key is not None:
            to_write = compute.write_arguments(rows, index, key, value, field)
        if query is not None:
            to_attend = compute.attention_arguments(rows, index, query, options, field, of_heads)
        bound = self._bound if options.seen_blocks is None else None  # a mask is of one plan
        if bound is not None and to_write is not None and to_attend is not None:
            bound.bind(index, options, to_write, to_attend)
        return to_write, to_attend


def _check_given(tensors: LayerTensors, field: str) -> None:
    """Check that the tensors either write, attend or do both. Raises InvalidRequestError."""
    query, key, value = tensors
    if key is None and (query is None or value is not None):
        raise InvalidRequestError(
            "must be given, unless the layer only attends: then there is a query and no value",
            field=f"{field}key",
        )


def _of_tokens(tensors: LayerTensors) -> LayerTensors:
    """Convert tensors [num_rows, heads, num_columns, size] to [num_tokens, heads, size]."""
    query, key, value = (None if tensor is None else of_tokens(tensor) for tensor in tensors)
    return query, key, value


def _like(query: torch.Tensor | None, output: torch.Tensor) -> torch.Tensor:
    """Convert an output of one row for each token to the shape of the query's dimensions."""
    if query is None or query.dim() != 4 or output.dim() == 4:
        return output
    return output.view(query.shape[0], query.shape[2], *output.shape[1:])
