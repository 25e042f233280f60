"""What a device that fails costs: an error, and neither tables, nor data, nor a wrong receipt."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError, PlanOutOfOrderError
from tests.helpers.data import data_rig
from tests.helpers.data.data_rig import LateRig, Rig, embedded_backend
from tests.helpers.data.kernel_faults import with_operations
from tests.helpers.data.kernel_sets import LateRuntime
from tests.helpers.data.plan_author import (
    HOST,
    forked,
    moved,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)


def test_a_plan_whose_batch_finds_no_memory_changes_nothing_and_can_be_shown_again() -> None:
    rig = LateRig()
    changes = [set_blocks(1, [(0, 1), (1, 1)])]
    plan = rig.plan(1, *changes, span(1, 0, 12))
    rig.runtime.failures.append(torch.OutOfMemoryError("no memory left"))
    with rig.refuses(InternalError):
        rig.executor.start(1, plan)
    assert rig.executor.counters.num_plans_started == 0
    assert rig.executor.start(1, plan).num_tokens == 12
    rig.run_layers(12)
    assert rig.author.read_receipt(rig.executor.receipt(1)).plan_number == 1


def test_no_layer_is_taken_before_all_transfers_of_the_plan_were_given_once() -> None:
    """The second batch of a plan's transfers fails, and is given again with the plan."""
    failures: list[Exception] = [InternalError("the launch failed")]

    def flaky(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
        if failures:
            raise failures.pop()
        CpuKernels(1).swap_blocks(source, destination, pairs)

    rig = Rig(kernels=with_operations(CpuKernels(1), swap_blocks=flaky))
    rig.admit(1)
    swap = set_blocks(3, [(0, 1)], tier=HOST), transfer(ref(2), ref(0, 1, HOST))
    plan = rig.plan(2, *forked(2, 1, 1, 1, 2), *swap, span(2, 12, 1))
    with pytest.raises(InternalError):
        rig.executor.start(1, plan)
    whole, query, key = torch.zeros(2, 1, 2, 2, 8, 16), tokens(1, 4), tokens(1)
    users: list[Callable[[], object]] = [
        lambda: rig.layer(0, 1),
        lambda: rig.run_layer(0, None, key, key),
        lambda: rig.run_layer(0, query, None, None),
        lambda: rig.executor.write_blocks(1, 2, 1, whole),
        lambda: rig.executor.receipt(1),
    ]
    for use in users:
        with rig.refuses(PlanOutOfOrderError, "plan.number"):
            use()
    assert rig.executor.start(1, plan).receipt is None
    assert rig.executor.counters.num_transferred_blocks == {"copy": 1, "swap_out": 1}
    parent, _ = rig.executor.read_blocks(1, 1, [1])
    assert torch.equal(rig.executor.pools.host_tier[0], rig.executor.pools.device_tier[1])
    rig.run_layers(1)
    child, _ = rig.executor.read_blocks(1, 2, [1])
    assert torch.equal(child[:, :, :, :, :4], parent[:, :, :, :, :4]), "the tokens before the fork"
    assert bool(child[:, :, :, :, 4].any()), "the child's own token"
    assert rig.author.read_receipt(rig.executor.receipt(1)).plan_number == 2


def test_a_plan_shown_again_gives_the_device_no_work_again() -> None:
    """Which saves a block of another tenant, clears it, copies and computes."""
    rig = LateRig()
    rig.admit(1)
    rig.fence(1)
    rig.open(2, tenant="another")
    saved = ref(3, 1, HOST), transfer(ref(0), ref(3, 1, HOST))
    rig.run(1, set_blocks(1, [(4, 1), (5, 1)]), span(1, 0, 12), session_id=2)
    new = *forked(2, 1, 1, 5, 2), set_blocks(3, [(0, 2)])
    plan = rig.plan(2, *new, *saved, span(2, 12, 1), span(3, 0, 2), session_id=2)
    rig.executor.start(2, plan)
    assert rig.executor.counters.num_cleared_blocks == 1
    num_given = rig.runtime.num_given
    again = rig.executor.start(2, plan)
    assert (again.number, again.num_tokens, again.num_spans) == (2, 3, 2)
    assert (again.receipt, again.had_run) == (None, False)
    assert rig.runtime.num_given == num_given
    assert rig.executor.counters.num_plans_started == 3


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_plan_under_which_the_device_failed_gets_no_receipt(is_lost: bool) -> None:
    rig, told = LateRig(), list[str]()
    rig.executor.device_watch.when_lost(lambda: told.append("lost"))
    plan = rig.plan(1, set_blocks(1, [(0, 1)]), span(1, 0, 5))
    rig.executor.start(1, plan)
    rig.run_layers(5)
    rig.runtime.failures.append(RuntimeError("illegal address"))
    if is_lost:  # what the check of the device finds
        rig.runtime.failures.append(RuntimeError("illegal address"))
    for use in (rig.executor.receipt, rig.executor.receipt, lambda _: rig.executor.start(1, plan)):
        with pytest.raises(InternalError, match="illegal address"):
            use(1)
    assert told == ["lost"] * is_lost
    assert rig.executor.counters.num_plans_run == 0


def test_all_plans_that_run_fail_with_the_device_and_one_of_whole_tables_goes_on() -> None:
    rig, told = LateRig(), list[str]()
    rig.executor.device_watch.when_lost(lambda: told.append("lost"))
    rig.open(2)
    for session in (1, 2):
        rig.start(1, set_blocks(1, [(session, 1)]), span(1, 0, 5), session_id=session)
    rig.layer(0, 5, session_id=2)
    rig.runtime.failures += [RuntimeError("illegal address")] * 2
    whole = set_blocks(1, [(1, 1)], allocated=False)
    assert rig.run(4, whole, resync=True).plan_number == 4
    assert told == ["lost"]
    with pytest.raises(InternalError, match="illegal address"):
        rig.layer(1, 5, session_id=2)


def test_blocks_that_could_not_be_cleared_are_still_anothers_for_the_next_plan() -> None:
    failures: list[Exception] = [InternalError("the launch failed")]

    def clear(pool: torch.Tensor, block_ids: torch.Tensor) -> None:
        if failures:
            raise failures.pop()
        CpuKernels(1).clear_blocks(pool, block_ids)

    rig = Rig(kernels=with_operations(CpuKernels(1), clear_blocks=clear))
    rig.admit(1)
    rig.fence(1)
    rig.open(2, tenant="another")
    with pytest.raises(InternalError):
        rig.start(1, set_blocks(1, [(0, 2)]), session_id=2)
    with rig.refuses(PlanOutOfOrderError, "plan.number"):
        rig.executor.read_blocks(2, 1, [0])
    assert bool(rig.executor.pools.device_tier[0].any())
    rig.run(3, set_blocks(1, [(0, 3)]), session_id=2, resync=True)
    assert not bool(rig.stored(2, 1, 1).any())


def test_a_plan_that_has_its_receipt_is_answered_with_it_when_a_later_one_failed() -> None:
    rig = LateRig()
    changes = [set_blocks(1, [(0, 1), (1, 1)])]
    first = rig.plan(1, *changes, span(1, 0, 12))
    rig.executor.start(1, first)
    rig.run_layers(12)
    receipt = rig.executor.receipt(1)
    second = rig.plan(2, span(1, 12, 1))
    rig.executor.start(1, second)
    rig.layer(0, 1)
    rig.runtime.give(fail)
    rig.layer(1, 1)
    again = rig.executor.start(1, first)
    assert (again.receipt, again.had_run) == (receipt, True)
    with pytest.raises(InternalError):
        rig.executor.start(1, second)
    assert rig.executor.start(1, first).receipt == receipt


@pytest.mark.parametrize("resync", [False, True])
def test_what_attends_after_the_receipt_is_done_before_the_next_plan(resync: bool) -> None:
    rig = LateRig(3)
    rig.admit(1)
    rig.runtime.set_stream(rig.runtime.new_stream())
    rig.runtime.early_share = 0.0
    output = rig.run_layer(0, tokens(12, 4), None, None)
    assert output is not None
    assert rig.runtime.num_waiting == 1
    rig.runtime.set_stream(0)
    whole = set_blocks(1, [(0, 1), (1, 1)], allocated=False)
    rig.start(2, *([whole] if resync else []), span(1, 12, 1), resync=resync)
    assert rig.runtime.num_waiting == 0
    assert not bool(output.isnan().any())


@pytest.mark.parametrize("fails", [False, True])
def test_pools_go_when_the_device_has_done_with_them_or_failed(fails: bool) -> None:
    rig, runtime = rig_with_work_waiting()
    if fails:
        runtime.failures.append(RuntimeError("unspecified launch failure"))
    pools = weakref.ref(rig.executor.pools)
    data_rig.made.clear()
    del rig
    gc.collect()
    assert pools() is None
    assert not runtime.failures, "the device was asked"
    assert fails or runtime.num_waiting == 0


def rig_with_work_waiting() -> tuple[LateRig, LateRuntime]:
    rig = LateRig()
    rig.admit(1)
    rig.runtime.early_share = 0.0
    move = moved(1, [ref(0), ref(1)], [ref(3, 1, HOST), ref(0, 1, HOST)])
    rig.start(2, *move, set_blocks(2, [(4, 1)]), span(2, 0, 2))
    assert rig.runtime.num_waiting == 1
    return rig, rig.runtime


def test_finish_waits_for_the_device() -> None:
    rig, runtime = rig_with_work_waiting()
    rig.executor.finish()
    assert runtime.num_waiting == 0


def lost(query: torch.Tensor) -> torch.Tensor:
    """An answer whose data never comes: to copy it raises what a failed device raises."""
    return torch.empty_like(query, device="meta")


def test_an_answer_that_the_device_lost_is_an_internal_error_on_its_way_to_a_message() -> None:
    with pytest.raises(InternalError, match="the device failed"):
        tensor_to_message(lost(tokens(1)))


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_message_whose_tensor_finds_no_device_is_an_internal_error(num_tokens: int) -> None:
    nowhere = torch.device("vulkan")  # which torch can name, and is not linked with
    with pytest.raises(InternalError, match="the device failed"):
        tensor_from_message(tensor_to_message(tokens(num_tokens)), nowhere, field="query")


def test_an_answer_that_the_device_lost_is_an_internal_error_in_the_engine() -> None:
    rig = Rig(
        kernels=with_operations(
            CpuKernels(1), paged_attention=lambda arguments: lost(arguments.query)
        )
    )
    backend = embedded_backend(rig)
    backend.start(rig.plan(1, set_blocks(1, [(0, 1)]), span(1, 0, 3)))
    parts = tokens(3, 4), tokens(3), tokens(3)
    with pytest.raises(InternalError, match="the device failed"):
        backend.layer(0, *parts, options=AttentionOptions(scale=0.25))


def fail() -> None:
    raise RuntimeError("no such place")
