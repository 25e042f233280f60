"""A pytest plugin that plants one fault in the data plane: the one that $FAULT names.

Run with it, the data plane's unit tests must fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from table_mutants import TABLE_MUTANTS

from data_plane.execution import executor, plan_runner
from data_plane.execution.shards import shard_kernels
from data_plane.kernels.backends import bound_layers
from data_plane.kernels.device import cuda_streams
from data_plane.memory import pool
from data_plane.plans import progress, sessions, verifier, write_checks
from data_plane.plans.batches import transfers
from data_plane.plans.tables import block_tables
from kvplane.errors import InternalError
from kvplane.layout import KEYS_AND_VALUES, LayerGroup
from kvplane.wire import columns
from kvplane.wire.plane.v1 import plan_pb2
from tests.helpers.data.kernel_faults import FAULTS, with_fault

_kernels_of = executor.kernels_of
_start = plan_runner.PlanRunner.start
_keep = block_tables.Publications.keep
_withdraw = block_tables.Publications.withdraw
_layer_scales = shard_kernels.layer_scales
_canonical = LayerGroup.canonical
_release = pool._release


def _nothing(*_args: Any, **_options: Any) -> None:
    return None


def _digest_alone(
    _key: bytes, _want: str, _tag: str, payload: bytes, _signature: bytes, *, field: str
) -> bytes:
    return verifier.signing.digest(payload)


def verification_skipped() -> None:
    """A payload signed with any key passes."""
    verifier.signing.verify = _digest_alone


def epoch_unchecked() -> None:
    verifier.Verifier._check_run = _nothing  # type: ignore[method-assign]


def version_unchecked() -> None:
    """Payloads of another version are read as if they were of this one."""
    verifier.OLDEST_PAYLOAD_VERSION = -(2**31)  # type: ignore[misc]
    verifier.NEWEST_PAYLOAD_VERSION = 2**31  # type: ignore[misc]


def unknown_fields_ignored() -> None:
    verifier.whole = lambda message, data, *, field, reader: message


def published_write_allowed() -> None:
    plan_runner.check_writable = _nothing
    write_checks.check_unpublished = _nothing


def publication_forgotten_at_the_kernel() -> None:
    """A block that is writable when a plan starts counts as writable for ever."""
    write_checks.WriteChecks.check_still_writable = _nothing  # type: ignore[method-assign]


def signatures_ignored() -> None:
    """A layer that was bound takes whatever tensors come."""
    bound_layers._signature = _nothing  # type: ignore[assignment]


def tokens_of_bound_keys_uncounted() -> None:
    """A layer that was bound takes keys and values of more tokens than the query has."""
    sign = bound_layers._signature

    def of_first(tensors: Any, options: Any) -> Any:
        query, key, value = tensors
        num = len(query)
        return sign((query, key[:num], None if value is None else value[:num]), options)

    bound_layers._signature = of_first


def options_of_bound_layers_ignored() -> None:
    """A layer that was bound attends with the options that it was bound with."""
    sign = bound_layers._signature
    bound_layers._signature = lambda tensors, options: (None, *sign(tensors, options)[1:])


def rows_of_bound_layers_ignored() -> None:
    """Tensors that are no rows of tokens where they are count as such."""

    def of_rows(tensors: Any) -> Any:
        return [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]

    bound_layers._of_rows = of_rows


def batches_kept() -> None:
    """A layer group goes on with the batch that was bound first."""
    run = bound_layers.BoundLayers.run

    def first(self: Any, bound: Any, batch: Any, *rest: Any) -> Any:
        return run(self, bound, self._batches.get(batch.group, (batch,))[0], *rest)

    bound_layers.BoundLayers.run = first  # type: ignore[method-assign]


def stale_publications_kept() -> None:
    """Publications are kept whatever generation they are of."""

    def keep(self: Any, message: Any, generations: Any, field: str) -> int:
        named = generations.copy()
        indices = block_tables.ints(columns.INT32, message.indices, field)
        named[indices] = block_tables.ints(columns.INT64, message.generations, field)
        return _keep(self, message, named, field)

    block_tables.Publications.keep = keep  # type: ignore[method-assign]


def withdrawals_ignored() -> None:
    """What was forgotten is reported all the same."""
    block_tables.Publications.withdraw = lambda *_: 0  # type: ignore[assignment]


def withdrawals_of_any_generation() -> None:
    """A withdrawal of an earlier generation drops the present one's publication."""

    def withdraw(self: Any, message: Any, generations: Any, field: str) -> int:
        named = generations.copy()
        indices = block_tables.ints(columns.INT32, message.indices, field)
        named[indices] = block_tables.ints(columns.INT64, message.generations, field)
        return _withdraw(self, message, named, field)

    block_tables.Publications.withdraw = withdraw  # type: ignore[method-assign]


def receipt_given_early() -> None:
    """The first layer counts for all."""
    progress.Progress.is_complete = property(  # type: ignore[method-assign, assignment]
        lambda self: self._written[0]
    )


def spans_written_shrink() -> None:
    """Blocks of a span that are given again count as the last that were given."""
    extend = progress.Progress.extend

    def forget(self: Any, layers: range, span: int, end: int) -> None:
        if self._of_spans is not None:
            self._of_spans[layers.start : layers.stop, span] = 0
        extend(self, layers, span, end)

    progress.Progress.extend = forget  # type: ignore[method-assign]


def gaps_in_blocks_allowed() -> None:
    """Blocks of a span may be given in any order, and the last ones count for all."""
    progress.Progress.check_no_gap = _nothing  # type: ignore[method-assign]


def layers_written_again_after_the_end() -> None:
    """A layer that comes after its plan has run overwrites what the receipt was given for."""
    layer = executor.Executor.layer

    def write_first(self: Any, session_id: int, index: int, *args: Any, **options: Any) -> Any:
        run = self._sessions.get(session_id).latest
        if run is not None and run.is_complete:
            arguments = self._compute.write_arguments(run.batch, index, *args[1:3])
            self._compute.write(arguments)
        return layer(self, session_id, index, *args, **options)

    executor.Executor.layer = write_first  # type: ignore[method-assign]


def transfers_run_twice() -> None:
    def start(self: Any, session: Any, plan: plan_pb2.Plan, digest: bytes) -> Any:
        if session.running is not None:
            session.running.num_batches_queued = 0
            session.running.transferred = False
        return _start(self, session, plan, digest)

    plan_runner.PlanRunner.start = start  # type: ignore[method-assign]


def receipted_plan_writes_again() -> None:
    """A receipt is forgotten at once, and its plan runs again."""

    def start(self: Any, session: Any, plan: plan_pb2.Plan, digest: bytes) -> Any:
        run = session.latest
        if run is not None and plan.number == run.number:
            run.receipt = None
            run.progress._written[:] = [False] * len(run.progress._written)
            run.num_batches_queued = 0
            run.transferred = False
            session.receipts.clear()
        return _start(self, session, plan, digest)

    plan_runner.PlanRunner.start = start  # type: ignore[method-assign]


def order_unchecked() -> None:
    def place(self: Any, plan: plan_pb2.Plan, digest: bytes) -> Any:
        known = self.receipts.get(plan.number)
        if known is not None:
            return known[1]
        running = self.running
        return running if running is not None and running.number == plan.number else None

    sessions.Session.continued = place  # type: ignore[method-assign]


def fenced_ordinals_forgotten() -> None:
    """A session that was fenced is opened again by its old grant."""
    sessions.EndedSessions.__contains__ = (  # type: ignore[method-assign]
        lambda self, ordinal: False
    )


def ended_ranges_grow_together() -> None:
    """What lies between two ended sessions counts as ended."""

    def contains(self: Any, ordinal: int) -> bool:
        return bool(self._first) and self._first[0] <= ordinal <= self._last[-1]

    sessions.EndedSessions.__contains__ = contains  # type: ignore[method-assign]


def ended_sessions_forgotten_under_the_same_key() -> None:
    end_all = sessions.Sessions.end_all

    def forget(self: Any, key_id: bytes) -> None:
        self._ended_by_key.pop(key_id, None)
        end_all(self, key_id)

    sessions.Sessions.end_all = forget  # type: ignore[method-assign]


def ended_sessions_forgotten_under_another_key() -> None:
    end_all = sessions.Sessions.end_all

    def forget(self: Any, key_id: bytes) -> None:
        if self._ended_by_key.get(key_id) is not self._ended:
            self._ended_by_key.pop(key_id, None)
        end_all(self, key_id)

    sessions.Sessions.end_all = forget  # type: ignore[method-assign]


def transfers_by_direction() -> None:
    """All copies first, then all swaps, as if none read what another wrote."""
    batches = transfers.Transfers.batches

    def sorted_batches(self: Any) -> Any:
        return sorted(batches(self), key=lambda b: (b.source, b.destination))

    transfers.Transfers.batches = sorted_batches  # type: ignore[method-assign]


def transfers_skipped() -> None:
    executor.ShardKernels.transfer = _nothing  # type: ignore[method-assign]


def compute_ahead_of_swaps() -> None:
    """Layers do not wait for the blocks that are swapped in."""
    flag = property(lambda _self: False, _nothing)
    cuda_streams.DeviceStreams._swaps_are_ahead = flag  # type: ignore[assignment]


def swaps_ahead_of_compute() -> None:
    @contextmanager
    def swapping(self: Any) -> Iterator[None]:
        self._swaps_are_ahead = True
        with self._runtime.on(self._swaps):
            yield

    cuda_streams.DeviceStreams.swapping = swapping  # type: ignore[method-assign]


def threads_in_no_order() -> None:
    """Different threads' streams are not put in order."""
    init = cuda_streams.DeviceStreams.__init__

    def forgetful(self: Any, runtime: Any) -> None:
        init(self, runtime)
        order = runtime.order
        runtime.order = lambda before, after: (
            order(before, after) if self._swaps in (before, after) else None
        )

    cuda_streams.DeviceStreams.__init__ = forgetful  # type: ignore[method-assign]


def host_reads_early() -> None:
    cuda_streams.DeviceStreams.finish_swaps = _nothing  # type: ignore[method-assign]


def receipts_before_the_end() -> None:
    executor.ShardKernels.finish = _nothing  # type: ignore[method-assign]


def fences_before_the_end() -> None:
    """Only receipts are waited for."""
    fence = executor.Executor.fence

    def hasty(self: Any, *args: Any) -> None:
        _without_quiet(lambda _: fence(self, *args))(self._plans)

    executor.Executor.fence = hasty  # type: ignore[method-assign]


def voided_plans_not_waited_for() -> None:
    plan_runner.PlanRunner._settle = _without_quiet(  # type: ignore[method-assign]
        plan_runner.PlanRunner._settle
    )


def failures_forgotten() -> None:
    """A plan on a device that failed counts as one that ran."""
    finish = executor.ShardKernels.finish

    def forgiving(self: Any) -> None:
        with suppress(InternalError):
            finish(self)

    executor.ShardKernels.finish = forgiving  # type: ignore[method-assign]


def layers_before_transfers() -> None:
    """A plan whose transfers failed takes layers."""
    sessions.RunningPlan.check_transferred = _nothing  # type: ignore[method-assign]


def pools_go_early() -> None:
    """Pools are freed while the device may still use them."""
    pool._release = lambda _drain, unpins: _release(_nothing, unpins)


def receipts_before_kept_ones() -> None:
    """The receipt of a plan that has run waits for a later plan."""

    def start(self: Any, session: Any, plan: plan_pb2.Plan, digest: bytes) -> Any:
        self._settle(session, voided=plan.resync)
        return _start(self, session, plan, digest)

    plan_runner.PlanRunner.start = start  # type: ignore[method-assign]


def late_attention_not_waited_for() -> None:
    """A plan that was used after its receipt is not marked as such."""
    flag = property(lambda _self: False, _nothing)
    sessions.RunningPlan.used_after_receipt = flag  # type: ignore[assignment]


def _without_quiet(method: Any) -> Any:
    def hasty(self: Any, *args: Any, **options: Any) -> None:
        self.quiesce = _nothing
        try:
            method(self, *args, **options)
        finally:
            del self.quiesce

    return hasty


def scales_of_the_wrong_heads() -> None:
    """Every shard takes the first heads' scales."""

    def of_first_heads(layout: Any, shard: Any, device: Any) -> Any:
        return _layer_scales(layout, replace(shard, first_kv_head=0), device)

    shard_kernels.layer_scales = of_first_heads


def fingerprint_without_scales() -> None:
    def canonical(self: Any) -> Any:
        return _canonical(replace(self, key_scales=(), value_scales=()))

    LayerGroup.canonical = canonical  # type: ignore[method-assign]


def latents_read_as_keys_and_values() -> None:
    """A pool of latents and one of keys and values of the same sizes are taken for one another."""

    def canonical(self: Any) -> Any:
        return _canonical(replace(self, cache_kind=KEYS_AND_VALUES))

    LayerGroup.canonical = canonical  # type: ignore[method-assign]


def latents_without_their_values_scale() -> None:
    """Only scores know the scale of what is stored."""

    def of_keys(layout: Any, shard: Any, device: Any) -> Any:
        return [(key_scales, None) for key_scales, _ in _layer_scales(layout, shard, device)]

    shard_kernels.layer_scales = of_keys


def latents_counted_twice() -> None:
    """Metrics count values that are not stored."""

    def of_both(keys: torch.Tensor, values: torch.Tensor) -> int:
        return (keys[0].nbytes + values[0].nbytes) // keys.shape[2]

    shard_kernels.bytes_of_token = of_both
    bound_layers.bytes_of_token = of_both


def _fault(name: str) -> Callable[[], None]:
    """Executors that are not given kernels take faulty ones."""

    def plant() -> None:
        executor.kernels_of = lambda *device: with_fault(_kernels_of(*device), name)

    return plant


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant
    for mutant in (
        verification_skipped,
        epoch_unchecked,
        version_unchecked,
        unknown_fields_ignored,
        published_write_allowed,
        publication_forgotten_at_the_kernel,
        signatures_ignored,
        options_of_bound_layers_ignored,
        rows_of_bound_layers_ignored,
        batches_kept,
        tokens_of_bound_keys_uncounted,
        stale_publications_kept,
        withdrawals_ignored,
        withdrawals_of_any_generation,
        receipt_given_early,
        spans_written_shrink,
        gaps_in_blocks_allowed,
        layers_written_again_after_the_end,
        transfers_run_twice,
        receipted_plan_writes_again,
        order_unchecked,
        fenced_ordinals_forgotten,
        ended_ranges_grow_together,
        ended_sessions_forgotten_under_the_same_key,
        ended_sessions_forgotten_under_another_key,
        transfers_by_direction,
        transfers_skipped,
        compute_ahead_of_swaps,
        swaps_ahead_of_compute,
        threads_in_no_order,
        host_reads_early,
        receipts_before_the_end,
        fences_before_the_end,
        voided_plans_not_waited_for,
        failures_forgotten,
        layers_before_transfers,
        pools_go_early,
        receipts_before_kept_ones,
        late_attention_not_waited_for,
        scales_of_the_wrong_heads,
        fingerprint_without_scales,
        latents_read_as_keys_and_values,
        latents_without_their_values_scale,
        latents_counted_twice,
    )
}
MUTANTS |= TABLE_MUTANTS
MUTANTS |= {name: _fault(name) for name in FAULTS}


def pytest_configure() -> None:
    MUTANTS[os.environ["FAULT"]]()
