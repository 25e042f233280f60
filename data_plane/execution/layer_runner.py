"""Runs layers of plans: every layer, from every caller, goes through ``LayerRunner``.

    gRPC message ─┐
    bound layer  ─┤  local socket       check_may_run ──► the layer's binding ──► kernels
    tensors      ─┤  embedded engine
    CUDA graph   ─┘  fixed step

``PlanRunner.check_may_run`` alone says whether a layer may run now. Which tensors it may have is
checked when the layer is bound: a layer that was called with tensors like these before is one
native call. Kernels that bind no layers check the arguments of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from data_plane.execution.layers import layer_index
from data_plane.execution.plan_runner import PlanRunner
from data_plane.execution.shards.row_slices import rows_of
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backends.bound_layers import BoundLayer, LayerTensors
from data_plane.plans.batches.attention_batch import AttentionBatch
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.slices import Slices


class RanLayer(NamedTuple):
    """A layer of the model that native code ran. ``seconds``: how long writing and attending
    took.
    """

    layer: int
    bound: BoundLayer
    seconds: Sequence[float]


ServeLayers = Callable[[Sequence[Any], int, int, int], None]
"""Runs bound layers in native code, for a short time. Arguments: native batches of the layer
groups; the first layer's index, and that of the first layer that must not run; threads.
"""


class LayerRunner:
    """The layers of all sessions of one executor, under whose lock its methods are called."""

    def __init__(self, plans: PlanRunner, compute: ShardKernels, layers: Sequence[int]) -> None:
        """``layers``: the model's layers in the shard."""
        self._plans = plans
        self._compute = compute
        self._layers = layers

    def run(
        self,
        session_id: int,
        layer: int,
        tensors: LayerTensors,
        options: AttentionOptions,
        plan_number: int,
        pass_index: int | None,
        field: str = "",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Write a layer of the session's latest plan that was not written yet, if there is a key,
        and attend if there is a query. See ``Executor.layer``.

        ``out`` receives the output: contiguous and apart from the tensors; None for new memory.
        Raises as ``PlanRunner.check_may_run``, and InvalidRequestError naming a field after the
        prefix ``field``.
        """
        compute = self._compute
        query, key, _ = tensors
        if key is None:
            _check_given(tensors, field)
        index = layer_index(self._layers, layer, field)
        run, may_write = self._plans.check_may_run(
            session_id,
            plan_number,
            pass_index,
            index,
            field,
            writes=key is not None,
            attends=query is not None,
        )
        batch = self._plans.batch(run, compute.group_of_layer(index))
        if may_write and query is not None:
            bound = compute.bound_layer(batch, index, tensors, options, out)
            if bound is None and query.dim() == 4:
                tensors = _of_tokens(tensors)
                bound = compute.bound_layer(batch, index, tensors, options, out)
            if bound is not None:
                attended = compute.write_and_attend(bound, run, batch, tensors, out)
                run.progress.finish_layer(index)
                return _like(query, attended)
        to_write, to_attend = self._check(batch, index, _of_tokens(tensors), options, field)
        if may_write and to_write is not None:
            compute.write(to_write)
        output = None
        if to_attend is not None:
            num_context = run.num_context_tokens(to_attend.options.sliding_window_tokens)
            output = _like(query, compute.attend(to_attend, num_context, out))
        if to_write is not None:
            run.progress.finish_layer(index)
        return output

    def run_slices(
        self,
        session_id: int,
        layer: int,
        tensors: LayerTensors,
        options: AttentionOptions,
        plan_number: int,
        pass_index: int | None,
        field: str,
        slice_s: float | None,
        out: torch.Tensor | None = None,
    ) -> Slices[torch.Tensor | None]:
        """Do as ``run`` does, but attend in slices of about ``slice_s``. The layer counts as
        written when its attention begins. Raises as ``run`` in each slice.
        """
        query, key, value = tensors
        _check_given(tensors, field)
        named = plan_number, pass_index, field
        compute, index = self._compute, layer_index(self._layers, layer, field)
        _, latest = self._plans.latest(session_id, plan_number, f"{field}plan_number")
        batch = self._plans.batch(latest, compute.group_of_layer(index))
        slices = compute.slices(batch.lengths, slice_s) if query is not None else []
        if not slices:
            return self.run(session_id, layer, tensors, options, *named, out)
        _, attention = self._check(batch, index, tensors, options, field)
        assert attention is not None
        if key is not None:
            self.run(session_id, layer, (None, key, value), options, *named)
        output = out
        if output is None:
            output = torch.empty(attention.output_shape, dtype=attention.query.dtype)
        num_context = latest.num_context_tokens(attention.options.sliding_window_tokens)
        for rows in slices:
            if rows.start:
                yield
            self._plans.check_may_run(
                session_id, plan_number, pass_index, index, field, writes=False, attends=True
            )
            output[rows.start : rows.stop] = compute.attend(
                rows_of(attention, rows), num_context * len(rows) // len(output)
            )
        return output

    def bind(
        self,
        session_id: int,
        layer: int,
        tensors: LayerTensors,
        options: AttentionOptions,
        plan_number: int,
        field: str = "",
    ) -> BoundLayer | None:
        """Check a layer's tensors and options for plans and passes of as many tokens as the
        session's present one, and bind it. Returns None for kernels that bind no layers, and for a
        layer that does not both write and attend.

        Raises as ``PlanRunner.latest``, and InvalidRequestError naming a field after ``field``.
        """
        query, key, _ = tensors
        index, compute = layer_index(self._layers, layer, field), self._compute
        _, run = self._plans.latest(session_id, plan_number, f"{field}plan_number")
        batch = self._plans.batch(run, compute.group_of_layer(index))
        if query is None or key is None:
            return None
        self._check(batch, index, tensors, options, field)
        return compute.bound_layer(batch, index, tensors, options, None)

    def serve(
        self,
        session_id: int,
        layer: int,
        plan_number: int,
        pass_index: int | None,
        slice_s: float,
        serve: ServeLayers,
        take_ran: Callable[[], Sequence[RanLayer]],
    ) -> Sequence[RanLayer]:
        """Let native code run bound layers from ``layer`` on: ``serve`` does, and ``take_ran``
        returns those that ran. It may run none of a plan that has run or that has to be cut into
        slices of ``slice_s``, and no last layer, which is followed by a receipt. Raises as
        ``PlanRunner.check_may_run``, and what ``serve`` does.
        """
        index, end = layer_index(self._layers, layer), len(self._layers) - 1
        if index >= end:
            return ()
        plans, compute = self._plans, self._compute
        run, may_write = plans.check_may_run(
            session_id, plan_number, pass_index, index, writes=True, attends=True
        )
        batches = [plans.batch(run, group) for group in range(len(run.attention))]
        if not may_write or any(compute.slices(batch.lengths, slice_s) for batch in batches):
            return ()
        try:
            serve([*map(compute.native_batch, batches)], index, end, compute.num_threads)
        finally:
            ran = take_ran()
            for each in ran:
                compute.count(each.bound, run, each.seconds)
                run.progress.finish_layer(self._layers.index(each.layer))
        return ran

    def _check(
        self,
        batch: AttentionBatch,
        index: int,
        tensors: LayerTensors,
        options: AttentionOptions,
        field: str,
    ) -> tuple[WriteArguments | None, AttentionArguments | None]:
        """Check a layer's tensors, [num_tokens, heads, size], and bind the layer for tensors like
        these if it both writes and attends. Raises InvalidRequestError.
        """
        compute, (query, key, value) = self._compute, tensors
        to_write = to_attend = None
        if key is not None:
            to_write = compute.write_arguments(batch, index, key, value, field)
        if query is not None:
            to_attend = compute.attention_arguments(batch, index, query, options, field)
        if to_write is not None and to_attend is not None:
            compute.bind(index, options, to_write, to_attend)
        return to_write, to_attend


def _check_given(tensors: LayerTensors, field: str) -> None:
    """Raise InvalidRequestError for tensors that say neither to write nor to attend alone."""
    query, key, value = tensors
    if key is None and (query is None or value is not None):
        raise InvalidRequestError(
            "must be given, unless the layer only attends: then there is a query and no value",
            field=f"{field}key",
        )


def _of_tokens(tensors: LayerTensors) -> LayerTensors:
    """Return tensors as [num_tokens, heads, size] that transformers has as [num_rows, heads,
    num_columns, size].
    """
    query, key, value = (
        tensor if tensor is None or tensor.dim() != 4 else tensor.transpose(1, 2).flatten(0, 1)
        for tensor in tensors
    )
    return query, key, value


def _like(query: torch.Tensor | None, output: torch.Tensor) -> torch.Tensor:
    """Return the output for a query of these dimensions, which had its tokens in rows."""
    if query is None or query.dim() != 4 or output.dim() == 4:
        return output
    return output.view(query.shape[0], query.shape[2], *output.shape[1:])
