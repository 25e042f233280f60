"""A plan's way from its start to its receipt: each part is given to the device once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data_plane.execution.counters import ExecutorCounters
from data_plane.execution.plan_runner import PlanLayer, PlanRunner, StartedPlan
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.memory.pool import Pools
from data_plane.plans.sessions import Session, Sessions
from data_plane.plans.tables.block_tables import BlockTables
from data_plane.plans.verifier import Verifier
from kvplane.errors import (
    BlockNotWritableError,
    InternalError,
    PlanOutOfOrderError,
    SessionExpiredError,
)
from kvplane.shard import Shard
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.kernel_sets import late_kernels
from tests.helpers.data.plan_author import (
    DEVICE,
    HOST,
    LAYOUT,
    POOL_ID,
    PlanAuthor,
    fork,
    publications,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)
from tests.helpers.refusals import refused


class Bench:
    """A runner on a device that does its work late, and what it is made of."""

    def __init__(self) -> None:
        kernels, self.runtime = late_kernels(CpuKernels(1), seed=0)
        self.runtime.let_go = 0.0
        cpu, shard, self.counters = torch.device("cpu"), Shard.whole(LAYOUT), ExecutorCounters()
        pools = Pools(
            LAYOUT,
            shard,
            num_device_blocks=8,
            num_host_blocks=4,
            device=cpu,
            drain=kernels.streams.drain,
        )
        self.pools = pools
        for tier in (pools.device_tier, pools.host_tier):
            tier.zero_()
        self.tables = BlockTables(pools.num_blocks, LAYOUT.block_size_tokens)
        self.verifier = Verifier(POOL_ID, 0, 1)
        self.author = PlanAuthor(self.verifier.epoch)
        self.verifier.install(1, self.author.key)
        self.compute = ShardKernels(
            LAYOUT, shard, pools, self.counters, device=cpu, kernels=kernels
        )
        self.sessions, self.num_checks = Sessions(), 0
        self.runner = PlanRunner(
            self.tables,
            self.sessions,
            self.compute,
            self.verifier,
            self.counters,
            layers=(0, 1),
            check_device=self._check_device,
        )
        self.session = self.open(1)

    def open(self, session_id: int, **fields: Any) -> Session:
        return self.sessions.open(self.verifier.grant(self.author.grant(session_id, **fields)))

    def start(self, number: int, session: Session | None = None, **fields: Any) -> StartedPlan:
        session = session or self.session
        return self.show(self.author.plan(number, session.id, **fields), session)

    def show(self, signed: pb.SignedPayload, session: Session | None = None) -> StartedPlan:
        return self.runner.start(session or self.session, *self.verifier.plan(signed))

    def write(self, layer: int, num_tokens: int) -> None:
        """Write a layer, in any order."""
        number = self.runner.latest(1, None)[1].number
        run, _ = self.runner.check_may_run(PlanLayer(1, 0, number), 0, writes=True, attends=False)
        key, value = tokens(num_tokens, seed=1), tokens(num_tokens, seed=2)
        self.compute.write(self.compute.write_arguments(run.attention[0], layer, key, value))
        run.progress.finish_layer(layer)

    def receipt(self) -> pb.SignedPayload | None:
        return self.runner.receipt(*self.runner.latest(1, None))

    def admit(self) -> None:
        """Plan 1 writes 12 tokens to blocks 0 and 1."""
        self.start(1, changes=[set_blocks(1, [(0, 1), (1, 1)])], spans=[span(1, 0, 12)])
        for layer in (0, 1):
            self.write(layer, 12)
        assert self.receipt() is not None

    def _check_device(self) -> None:
        self.num_checks += 1


@pytest.fixture
def bench() -> Bench:
    return Bench()


COPY: dict[str, Any] = {
    "changes": [fork(2, 1, 2), set_blocks(2, [(2, 1)], first_block=1)],
    "transfers": [transfer(ref(1), ref(2))],
    "spans": [span(2, 12, 1)],
}


def test_a_receipt_comes_when_all_layers_are_written_and_the_device_is_done(bench: Bench) -> None:
    bench.start(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 5)])
    assert bench.receipt() is None
    bench.write(1, 5)
    assert bench.receipt() is None
    bench.write(0, 5)
    assert bench.runtime.num_waiting == 2, "and nobody has waited for them yet"
    receipt = bench.author.read_receipt(bench.receipt())
    assert receipt.plan_number == 1
    assert bench.runtime.num_waiting == 0
    assert (bench.counters.num_plans_started, bench.counters.num_plans_run) == (1, 1)


def test_a_plan_shown_again_goes_on_and_one_that_has_run_gives_its_receipt(bench: Bench) -> None:
    bench.admit()
    plan = bench.author.plan(2, **COPY)
    bench.show(plan)
    num_given = bench.runtime.num_given
    again = bench.show(plan)
    assert (again.number, again.num_tokens, again.num_spans) == (2, 1, 1)
    assert (again.receipt, again.had_run) == (None, False)
    assert bench.runtime.num_given == num_given, "its transfers are not given twice"
    for layer in (0, 1):
        bench.write(layer, 1)
    receipt = bench.receipt()
    after = bench.show(plan)
    assert (after.num_tokens, after.num_spans) == (1, 1)
    assert (after.receipt, after.had_run) == (receipt, True)
    assert bench.counters.num_plans_started == 2


def test_a_plan_without_spans_has_run_when_it_has_started(bench: Bench) -> None:
    started = bench.start(1, changes=[set_blocks(1, [(0, 1)])])
    assert not started.had_run
    assert bench.author.read_receipt(started.receipt).plan_number == 1


def test_a_plan_that_is_refused_leaves_tables_and_session_as_they_were(bench: Bench) -> None:
    bench.admit()
    with pytest.raises(BlockNotWritableError):
        bench.start(2, changes=[fork(2, 1, 2)], spans=[span(2, 12, 1)])
    assert bench.tables.num_sequences == 1
    assert bench.session.running is None
    assert bench.counters.num_plans_started == 1
    bench.tables.check_integrity()


def test_transfers_that_failed_go_on_where_they_stopped(bench: Bench) -> None:
    bench.admit()
    changes = [set_blocks(2, [(2, 1)]), set_blocks(3, [(0, 1)], tier=HOST)]
    transfers = [transfer(ref(1), ref(2)), transfer(ref(2), ref(0, 1, HOST))]
    plan = bench.author.plan(2, changes=changes, transfers=transfers)
    given, failures = bench.compute.transfer, [None, InternalError("the launch failed"), None]

    def transfer_or_fail(batch: Any) -> None:
        failure = failures.pop(0)
        if failure is not None:
            raise failure
        given(batch)

    bench.compute.transfer = transfer_or_fail  # type: ignore[method-assign]
    with pytest.raises(InternalError):
        bench.show(plan)
    with pytest.raises(PlanOutOfOrderError):
        bench.runner.latest(1, None)
    assert bench.show(plan).receipt is not None
    assert failures == []
    assert bench.counters.num_transferred_blocks == {"copy": 1, "swap_out": 1}
    assert torch.equal(bench.pools.host_tier[0], bench.pools.device_tier[1])


def test_another_tenants_blocks_are_cleared_before_the_transfers(bench: Bench) -> None:
    bench.admit()
    bob = bench.open(2, tenant="bob")
    bench.sessions.fence(1, 1)
    bench.tables.drop_session(1)
    bench.start(1, bob, changes=[set_blocks(1, [(0, 2), (3, 1)])], spans=[span(1, 0, 1)])
    bench.compute.finish()
    assert not bench.pools.device_tier[0].any()
    assert bench.pools.device_tier[1].any(), "nobody was given this one"
    assert bench.counters.num_cleared_blocks == 1


def test_a_block_that_is_published_after_the_start_is_not_written(bench: Bench) -> None:
    bench.start(1, changes=[set_blocks(1, [(0, 1), (1, 1)])], spans=[span(1, 0, 12)])
    bench.write(0, 12)
    present = bench.tables.generations[DEVICE]
    bench.tables.publications[0].keep(publications((1, 1)), present, "publications")
    with pytest.raises(BlockNotWritableError):
        bench.write(1, 12)


def test_layers_are_for_the_latest_plan_and_no_other(bench: Bench) -> None:
    with pytest.raises(PlanOutOfOrderError, match="the session has not started a plan"):
        bench.runner.latest(1, None)
    bench.start(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 1)])
    for number in (None, 1):
        session, run = bench.runner.latest(1, number)
        assert (session, run.number) == (bench.session, 1)
    with refused(PlanOutOfOrderError, "plan.number", match="the session's latest plan is 1"):
        bench.runner.latest(1, 2)
    with pytest.raises(SessionExpiredError):
        bench.runner.latest(9, None)


def test_a_plan_under_which_the_device_failed_gets_no_receipt(bench: Bench) -> None:
    plan = bench.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 5)])
    bench.show(plan)
    for layer in (0, 1):
        bench.write(layer, 5)
    bench.runtime.failures.append(RuntimeError("illegal address"))
    for use in (bench.receipt, bench.receipt, lambda: bench.show(plan)):
        with pytest.raises(InternalError, match="illegal address"):
            use()
    assert bench.num_checks == 1
    assert bench.counters.num_plans_run == 0


@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_plan_of_whole_tables_voids_one_that_runs_and_waits_for_it(
    bench: Bench, is_quiet: bool
) -> None:
    bench.admit()
    bench.start(2, spans=[span(1, 12, 1)])
    bench.write(0, 1)
    if not is_quiet:
        bench.runtime.failures.append(RuntimeError("illegal address"))
    started = bench.start(
        4, resync=True, changes=[set_blocks(1, [(0, 1), (1, 1)], allocated=False)]
    )
    assert bench.author.read_receipt(started.receipt).plan_number == 4
    assert bench.runtime.num_waiting == 0
    assert bench.num_checks == (not is_quiet)


def test_a_next_plan_waits_for_the_receipt_of_the_one_that_is_complete(bench: Bench) -> None:
    bench.start(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 5)])
    for layer in (0, 1):
        bench.write(layer, 5)
    bench.start(2, spans=[span(1, 5, 1)])
    assert bench.session.finished == 1
    assert bench.runtime.num_waiting == 0


def test_all_plans_that_run_fail_with_the_device(bench: Bench) -> None:
    for session, block in ((bench.session, 0), (bench.open(2), 1)):
        changes = [set_blocks(1, [(block, 1)])]
        bench.start(1, session, changes=changes, spans=[span(1, 0, 5)])
    bench.runtime.failures.append(RuntimeError("illegal address"))
    bench.runner.quiesce()
    for session_id in (1, 2):
        with pytest.raises(InternalError):
            bench.runner.latest(session_id, None)
