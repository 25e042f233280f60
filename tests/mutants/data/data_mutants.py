"""A pytest plugin that plants one fault in the data plane: the one that $DATA_MUTANT names.

Run with it, the data plane's unit tests must fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from kernel_faults import FAULTS, with_fault

from data_plane import executor
from data_plane.kernels import cuda_streams, scales, shard_kernels
from data_plane.memory import pool
from data_plane.plans import (
    attention_batch,
    block_tables,
    sessions,
    table_changes,
    verifier,
)
from kvplane.errors import InternalError
from kvplane.layout import LayerGroup
from kvplane.v1 import types_pb2 as pb

_kernels_of = executor.kernels_of
_start = executor.Executor._start
_transfer = executor.Compute.transfer
_hand_out = block_tables.ResidentTables.hand_out
_open = sessions.Sessions.open
_get = sessions.Sessions.get
_layer_scales = scales.layer_scales
_canonical = LayerGroup.canonical


def _nothing(*_args: Any, **_options: Any) -> None:
    return None


def verification_skipped() -> None:
    """Whatever is signed with any key passes."""
    verifier.signing.verify = _nothing


def epoch_unchecked() -> None:
    verifier.Authority._check_life = _nothing  # type: ignore[method-assign]


def generation_unchecked() -> None:
    table_changes.check_generation = _nothing


def published_write_allowed() -> None:
    attention_batch.check_writable = _nothing
    executor.check_writable = _nothing


def publication_forgotten_at_the_kernel() -> None:
    """Writable at the start of a plan counts as writable for ever."""
    executor.Executor._check_still_writable = _nothing  # type: ignore[method-assign]


def publication_survives_hand_out() -> None:
    def hand_out(self: Any, tier: pb.Tier, index: int, generation: int) -> None:
        publication = self.publications.get(index)
        _hand_out(self, tier, index, generation)
        if publication is not None:
            self.publications[index] = publication

    block_tables.ResidentTables.hand_out = hand_out  # type: ignore[method-assign]


def other_sessions_blocks_handed_out() -> None:
    block_tables.ResidentTables.naming_sessions = lambda *_args: ()  # type: ignore[method-assign]


def refused_plans_not_undone() -> None:
    block_tables.ResidentTables._undo = _nothing  # type: ignore[method-assign]


def receipt_given_early() -> None:
    """The first layer counts for all."""
    sessions.Run.is_complete = property(  # type: ignore[method-assign, assignment]
        lambda run: run.transferred and (run.written.numel() == 0 or bool(run.written[0].all()))
    )


def transfers_run_twice() -> None:
    def start(self: Any, session: Any, plan: pb.Plan, payload: bytes) -> Any:
        if session.running is not None:
            session.running.num_batches_given = 0
        return _start(self, session, plan, payload)

    executor.Executor._start = start  # type: ignore[method-assign]


def receipted_plan_writes_again() -> None:
    """A receipt is forgotten at once, and the plan taken as one that runs."""

    def start(self: Any, session: Any, plan: pb.Plan, payload: bytes) -> Any:
        if session.latest is not None and plan.number == session.latest.number:
            session.latest.receipt = None
            session.latest.written[:] = False
            session.latest.num_batches_given = 0
            session.receipts.clear()
        return _start(self, session, plan, payload)

    executor.Executor._start = start  # type: ignore[method-assign]


def order_unchecked() -> None:
    def place(self: Any, plan: pb.Plan, digest: bytes) -> Any:
        known = self.receipts.get(plan.number)
        if known is not None:
            return known[1]
        running = self.running
        return running if running is not None and running.number == plan.number else None

    sessions.Session.place = place  # type: ignore[method-assign]


def fenced_sessions_open_again() -> None:
    def open_again(self: Any, grant: pb.SessionGrant) -> Any:
        self._fenced.clear()
        self._fenced_through = 0
        return _open(self, grant)

    sessions.Sessions.open = open_again  # type: ignore[method-assign]


def transfers_skipped() -> None:
    executor.Compute.transfer = _nothing  # type: ignore[method-assign]


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
    """Each thread's stream goes its own way."""
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
    executor.Compute.finish = _nothing  # type: ignore[method-assign]


def fences_before_the_end() -> None:
    """Only receipts are waited for."""
    executor.Executor.fence = _without_quiet(executor.Executor.fence)  # type: ignore[method-assign]


def voided_plans_not_waited_for() -> None:
    executor.Executor._settle = _without_quiet(  # type: ignore[method-assign]
        executor.Executor._settle
    )


def failures_forgotten() -> None:
    """A plan on a device that failed is one that ran."""
    finish = executor.Compute.finish

    def forgiving(self: Any) -> None:
        with suppress(InternalError):
            finish(self)

    executor.Compute.finish = forgiving  # type: ignore[method-assign]


def layers_before_transfers() -> None:
    """A plan whose transfers failed takes layers."""
    latest = executor.Executor._latest

    def hasty(self: Any, session_id: int, plan_number: int | None) -> Any:
        run = self._sessions.get(session_id).latest
        if run is None or run.transferred:
            return latest(self, session_id, plan_number)
        return self._sessions.get(session_id), run

    executor.Executor._latest = hasty  # type: ignore[method-assign]


def pools_go_early() -> None:
    """While the device may still use them."""
    pool._let_go = lambda _drain, unpin: unpin()


def receipts_before_kept_ones() -> None:
    """A plan that has run waits for a later one."""

    def start(self: Any, session: Any, plan: pb.Plan, payload: bytes) -> Any:
        self._settle(session, voided=plan.resync)
        return _start(self, session, plan, payload)

    executor.Executor._start = start  # type: ignore[method-assign]


def late_attention_not_waited_for() -> None:
    """Nobody remembers that a plan was used after its receipt."""
    flag = property(lambda _self: False, _nothing)
    sessions.Run.used_after_receipt = flag  # type: ignore[assignment]


def _without_quiet(method: Any) -> Any:
    def hasty(self: Any, *args: Any, **options: Any) -> None:
        self._quiesce = _nothing
        try:
            method(self, *args, **options)
        finally:
            del self._quiesce

    return hasty


def scales_of_the_wrong_heads() -> None:
    """Every shard takes the first heads' scales."""

    def of_first_heads(layout: Any, shard: Any, device: Any) -> Any:
        return _layer_scales(layout, replace(shard, first_kv_head=0), device)

    scales.layer_scales = of_first_heads
    shard_kernels.layer_scales = of_first_heads


def fingerprint_without_scales() -> None:
    def canonical(self: Any) -> Any:
        return _canonical(replace(self, key_scales=(), value_scales=()))

    LayerGroup.canonical = canonical  # type: ignore[method-assign]


def _fault(name: str) -> Callable[[], None]:
    """Every executor that brings no kernels of its own takes faulty ones."""

    def plant() -> None:
        executor.kernels_of = lambda *device: with_fault(_kernels_of(*device), name)

    return plant


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant
    for mutant in (
        verification_skipped,
        epoch_unchecked,
        generation_unchecked,
        published_write_allowed,
        publication_forgotten_at_the_kernel,
        publication_survives_hand_out,
        other_sessions_blocks_handed_out,
        refused_plans_not_undone,
        receipt_given_early,
        transfers_run_twice,
        receipted_plan_writes_again,
        order_unchecked,
        fenced_sessions_open_again,
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
    )
}
MUTANTS |= {name: _fault(name) for name in FAULTS}


def pytest_configure() -> None:
    MUTANTS[os.environ["DATA_MUTANT"]]()
