"""Operations of a step: each item is done or refused by itself, with the books in balance."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.steps.operations import Named, read_operations
from kvplane import ops
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    QuotaExceededError,
    SequenceBusyError,
    SequenceExistsError,
    SequenceNotFoundError,
    SequenceSwappedError,
)
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.error_messages import from_wire
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.planning.planning_rig import (
    BLOCK_SIZE,
    DEVICE,
    HOST,
    PlanningRig,
    entries_of,
    spans_of,
    transfers_of,
)


@pytest.fixture
def rig() -> PlanningRig:
    """Sequence 1 of 12 tokens, all written; its first block is published."""
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.run()
    return rig


def assert_counted(operations: list[cpb.Operation], num: int) -> None:
    assert len(read_operations(operations, num)) == len(operations)
    with pytest.raises(InvalidRequestError, match=f"operations: must have at most {num - 1} items"):
        read_operations(operations, num - 1)


def test_items_are_counted_by_their_columns_and_each_operation_as_one_at_least() -> None:
    operations = [
        (cpb.Operation(), 1),
        (ops.admit(1, []), 1),
        (ops.admit(1, [], fork_sequence_ids=[2]), 2),
        (ops.free([]), 1),
        (ops.free([1, 2, 3]), 3),
        (ops.swap([1, 2], "host"), 2),
        (ops.fork(1, [2, 3]), 2),
        (ops.append([1, 2], (), 1, first_positions=0), 2),
    ]
    for operation, num in operations:
        assert_counted([operation], num)
    assert_counted([operation for operation, _ in operations], 14)


def may_plan(named: Named) -> bool:
    operation, message = named
    return operation.may_plan(message)


def test_only_an_append_of_tokens_alone_makes_no_plan() -> None:
    (tokens,) = read_operations(
        [ops.append([1, 2], [5], 0, first_positions=0, num_tokens=[1, 0])], 9
    )
    assert not may_plan(tokens)
    for operation in (
        ops.append([1, 2], (), [0, 1], first_positions=0),
        ops.free([1]),
        ops.fork(1, 2),
        cpb.Operation(),
    ):
        assert may_plan(*read_operations([operation], 9))


def test_an_admission_shares_what_is_cached_and_computes_the_rest(rig: PlanningRig) -> None:
    (result,), plan = rig.step(ops.admit(2, [*range(8), *range(50, 60)]))
    assert result.admit == cpb.AdmitResult(
        num_cached_tokens=8, num_blocks=3, num_scheduled_tokens=10
    )
    assert plan is not None
    shared = rig.state(1).table[0]
    assert [(index, new) for index, _, new in entries_of(plan.changes)] == [
        (shared, False),
        *((block, True) for block in rig.state(2).table[1:]),
    ]
    assert spans_of(plan.spans) == [(2, 8, 10)]
    counters = rig.pool.counters()
    assert (counters.num_lookup_tokens, counters.num_hit_tokens) == (12 + 18, 8)
    rig.check()


def test_the_last_token_of_a_cached_prompt_is_computed_into_a_copy(rig: PlanningRig) -> None:
    (result,), plan = rig.step(ops.admit(2, range(8)))
    assert (result.admit.num_cached_tokens, result.admit.num_scheduled_tokens) == (7, 1)
    assert plan is not None
    (table,) = rig.state(2).table
    ((source, destination),) = transfers_of(plan.transfers)
    assert (source[1], destination[1]) == (rig.state(1).table[0], table)
    rig.check()


def test_an_admission_may_pass_over_the_cache_and_compute_in_parts(rig: PlanningRig) -> None:
    (result,), plan = rig.step(
        ops.admit(2, range(12), skip_prefix_lookup=True, num_compute_tokens=5)
    )
    assert (result.admit.num_cached_tokens, result.admit.num_scheduled_tokens) == (0, 5)
    assert plan is not None
    assert spans_of(plan.spans) == [(2, 0, 5)]
    assert rig.pool.counters().num_lookup_tokens == 12, "that of the first sequence"


def test_a_fork_shares_all_blocks_and_waits_for_the_same_receipts(rig: PlanningRig) -> None:
    rig.step(ops.append(1, [12], 1, first_positions=12))
    (result,), plan = rig.step(ops.fork(1, [2, 3]))
    assert list(columns.read(INT32, result.num_table_blocks, "num_blocks")) == [2, 2]
    assert plan is not None
    rig.check()
    rig.run()
    parent, *children = (rig.state(i) for i in (1, 2, 3))
    assert all(child.table == parent.table for child in children)
    assert [child.num_written for child in children] == [13, 13]
    assert [child.admitted_by for child in children] == [3, 3]


def test_a_swap_moves_shared_blocks_once_and_comes_back(rig: PlanningRig) -> None:
    rig.step(ops.fork(1, 2))
    (out,), plan = rig.step(ops.swap([1, 2], "host"))
    assert out.num_swapped_blocks == 2
    assert plan is not None
    assert len(transfers_of(plan.transfers)) == 2
    first, second = rig.state(1), rig.state(2)
    assert (first.tier, first.table) == (HOST, second.table)
    rig.check()
    rig.run()
    (back,), _ = rig.step(ops.swap([2], "device"))
    assert back.num_swapped_blocks == 2
    assert (rig.state(1).tier, rig.state(2).tier) == (HOST, DEVICE)
    rig.check()
    counters = rig.pool.counters()
    assert (counters.num_swapped_out_blocks, counters.num_swapped_in_blocks) == (2, 2)


def test_a_free_says_how_many_blocks_no_table_refers_to_now(rig: PlanningRig) -> None:
    rig.step(ops.fork(1, 2))
    (result,), plan = rig.step(ops.free([2, 1]))
    assert list(columns.read(INT32, result.num_released_blocks, "num")) == [0, 2]
    assert plan is not None
    assert rig.live() == []
    rig.check()


HERE: dict[str, tuple[cpb.Operation, type[KvplaneError], str]] = {
    "no operation": (cpb.Operation(), InvalidRequestError, ""),
    "id 0": (ops.admit(0, [1]), InvalidRequestError, "admit.sequence_id"),
    "a live id": (ops.admit(1, [1]), SequenceExistsError, "admit.sequence_id"),
    "no tokens": (ops.admit(2, []), InvalidRequestError, "admit.token_ids"),
    "a negative token": (ops.admit(2, [-1]), InvalidRequestError, "admit.token_ids[0]"),
    "no parent": (ops.fork(9, 2), SequenceNotFoundError, "fork.parent_sequence_ids[0]"),
    "a live child": (ops.fork(1, 1), SequenceExistsError, "fork.sequence_ids[0]"),
    "nothing to free": (ops.free([9]), SequenceNotFoundError, "free.sequence_ids[0]"),
    "nothing to swap": (ops.swap([], "host"), InvalidRequestError, "swap.sequence_ids"),
    "one twice": (ops.swap([1, 1], "host"), InvalidRequestError, "swap.sequence_ids[1]"),
    "there already": (ops.swap([1], "device"), SequenceSwappedError, "swap.sequence_ids[0]"),
}


@pytest.mark.parametrize("reason", HERE)
def test_what_is_refused_is_named_from_the_step_on_and_changes_nothing(
    rig: PlanningRig, reason: str
) -> None:
    operation, error, field = HERE[reason]
    (other, result), plan = rig.step(ops.free([]), operation)
    assert not other.failures
    (failure,) = result.failures
    assert failure.status == cpb.ITEM_STATUS_FAILED
    assert type(from_wire(failure.error)) is error
    assert failure.error.field == (f"operations[1].{field}" if field else "operations[1]")
    assert plan is None
    assert rig.live() == [1]
    rig.check()


@pytest.mark.parametrize("operation", [ops.free([1]), ops.fork(1, 2), ops.swap([1], "host")])
def test_a_sequence_that_computes_in_the_step_is_left_alone(
    rig: PlanningRig, operation: cpb.Operation
) -> None:
    (_, result), _ = rig.step(ops.append(1, [12], 1, first_positions=12), operation)
    assert type(from_wire(result.failures[0].error)) is SequenceBusyError
    rig.check()


def test_one_item_that_fails_leaves_the_others_done(rig: PlanningRig) -> None:
    (result,), _ = rig.step(ops.fork([1, 9, 1], [2, 3, 4]))
    assert [failure.item for failure in result.failures] == [1]
    assert rig.live() == [1, 2, 4]


def test_admissions_wait_or_never_fit(rig: PlanningRig) -> None:
    never, later, fits = (
        ops.admit(2, range(200, 201), max_total_tokens=8 * BLOCK_SIZE + 1),
        ops.admit(3, range(200, 200 + 7 * BLOCK_SIZE)),
        ops.admit(4, range(200, 200 + 6 * BLOCK_SIZE)),
    )
    results, _ = rig.step(never, later, fits)
    statuses: list[Any] = [[f.status for f in result.failures] for result in results]
    assert statuses == [
        [cpb.ITEM_STATUS_NEVER],
        [cpb.ITEM_STATUS_LATER],
        [],
    ]
    rig.check()


def test_a_session_has_no_more_sequences_than_the_limit() -> None:
    rig = PlanningRig(max_sequences=2)
    rig.admit(1, range(12))
    (first, *others), _ = rig.step(ops.fork(1, 2), ops.fork(1, 3), ops.admit(3, [1]))
    assert not first.failures
    for result in others:
        assert type(from_wire(result.failures[0].error)) is QuotaExceededError
    rig.check()
