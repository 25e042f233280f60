"""Layers that an engine in this process calls step after step, with tensors like those of the step
before: one native call each, and little Python beside it. Python code is slow between two layers,
because the model's weights evict it from the processor's caches.

The checks of a layer's first call hold for tensors of the same shapes and strides. A plan's or
pass's batches are looked up when it begins; each layer checks what others may have changed since.
A call with anything unexpected is left to ``Executor.layer``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from data_plane.execution.plan_runner import PlanRunner
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.kernels.backends.bound_layers import BoundLayer
from data_plane.plans.sessions import RunningPlan, Session
from kvplane.attention_options import AttentionOptions


@dataclass(frozen=True, slots=True)
class _Known:
    """A layer as it was called last. ``signature``: of query, key and value. ``index``: the
    layer's in the shard.
    """

    signature: tuple[Any, ...]
    options: AttentionOptions
    index: int
    group: int
    num_tokens: int
    bound: BoundLayer
    output_shape: tuple[int, ...]


@dataclass(slots=True)
class _Begun:
    """The plan or pass that began last. ``batches``: native, one for each layer group."""

    session: Session
    run: RunningPlan
    pass_index: int | None
    batches: Sequence[Any]
    num_threads: int


class RepeatedLayers:
    """The repeated layers of one session."""

    def __init__(
        self,
        session_id: int,
        plans: PlanRunner,
        compute: ShardKernels,
        layers: Sequence[int],
        lock: AbstractContextManager[Any],
        observe: Callable[[str, float], None] | None,
    ) -> None:
        """``compute``: its kernels bind layers. ``lock`` is held while a layer runs. ``layers``:
        the model's layers in the shard. ``observe``: the executor's.
        """
        self._session_id = session_id
        self._plans = plans
        self._compute = compute
        self._indices = {layer: index for index, layer in enumerate(layers)}
        self._lock = lock
        self._observe = observe
        self._begun: _Begun | None = None
        self._known: dict[int, _Known] = {}
        # Layers that ran and are not counted yet: counting many in a row takes less time.
        self._ran: list[tuple[_Known, float, float]] = []

    def begin(self, plan_number: int, pass_index: int | None = None) -> None:
        """Note that this plan or pass was begun: the next layers belong to it. Raises as
        ``PlanRunner.present``.
        """
        with self._lock:
            self.count()
            session, run = self._plans.present(self._session_id, plan_number, pass_index)
            batches = [self._plans.batch(run, group) for group in range(len(run.attention))]
            self._begun = _Begun(
                session,
                run,
                run.pass_index,
                [*map(self._compute.native_batch, batches)],
                self._compute.num_threads,
            )

    def layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor | None:
        """``Executor.layer`` for tensors as transformers has them: query [num_rows, num_heads,
        num_columns, head_size], key and value [num_rows, num_kv_heads, num_columns, size], rows one
        after another. Returns [num_rows, num_columns, num_heads, size], or None where
        ``Executor.layer`` has to be called, before anything was written.
        """
        signature = (
            *(query.shape, query.stride(), query.dtype, query.device),
            *(key.shape, key.stride(), key.dtype, key.device),
            *(value.shape, value.stride(), value.dtype, value.device),
        )
        known = self._known.get(layer)
        with self._lock:
            if known is None or known.signature != signature or known.options != options:
                known = self._find(layer, query, key, value, options, signature)
            begun = self._begun
            if known is None or begun is None or not self._goes_on(begun, known):
                self.count()
                return None
            output = torch.empty(known.output_shape, dtype=query.dtype, device="cpu")
            began_s = time.perf_counter()
            try:
                write_s = known.bound.native.write_and_attend(
                    begun.batches[known.group],
                    query.data_ptr(),
                    key.data_ptr(),
                    value.data_ptr(),
                    output.data_ptr(),
                    begun.num_threads,
                )
            except IndexError:  # nothing was written; Executor.layer reports what is wrong
                return None
            begun.run.progress.finish_layer(known.index)
            self._ran.append((known, write_s, time.perf_counter() - began_s - write_s))
            if known.index == len(self._indices) - 1:
                self.count()
            return output

    def _goes_on(self, begun: _Begun, known: _Known) -> bool:
        """Return whether the plan is unchanged since it began, and the layer is its next one."""
        session, run = begun.session, begun.run
        return (
            session.latest is run
            and not session.has_ended
            and run.pass_index == begun.pass_index
            and not run.failure
            and known.num_tokens == run.attention[known.group].num_tokens
            and run.progress.comes_next(known.index)
            and self._plans.write_checks.is_unchanged(run)
            and self._compute.sees(known.bound, run.attention[known.group])
        )

    def _find(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        signature: tuple[Any, ...],
    ) -> _Known | None:
        index, begun = self._indices.get(layer), self._begun
        tensors = query, key, value
        if index is None or begun is None or not all(t.dim() == 4 and t.is_cpu for t in tensors):
            return None
        rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
        if any(a.data_ptr() != b.data_ptr() for a, b in zip(tensors, rows, strict=True)):
            return None  # they are copies
        group = self._compute.group_of_layer(index)
        batch = self._plans.batch(begun.run, group)
        bound = self._compute.bound_layer(batch, index, rows[0], rows[1], rows[2], options)
        if bound is None:
            return None
        shape = query.shape[0], query.shape[2], *bound.output_heads
        known = self._known[layer] = _Known(
            signature, options, index, group, batch.num_tokens, bound, shape
        )
        return known

    def count(self) -> None:
        """Add the layers that ran to the counters."""
        if not self._ran or self._begun is None:
            return
        run = self._begun.run
        for known, *seconds in self._ran:
            num_context = run.num_context_tokens(known.bound.window_tokens)
            self._compute.count(known.bound, known.num_tokens, num_context, seconds)
            if self._observe is not None:
                self._observe("layer", sum(seconds))
        self._ran.clear()
