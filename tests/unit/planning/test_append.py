"""Appends: sequences grow, each item by itself, and what fails changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane import ops
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.planning.planning_rig import BLOCK_SIZE, PlanningRig, spans_of, transfers_of


def run(
    rig: PlanningRig, *items: tuple[int, int, int, list[int]]
) -> tuple[cpb.OperationResult, plan_pb2.Plan]:
    """Append (sequence, first position, slots, tokens) of each item; its result and the plan."""
    ids, firsts, slots, tokens = zip(*items, strict=True)
    given_tokens = [token for of_item in tokens for token in of_item]
    operation = ops.append(
        ids, given_tokens, slots, first_positions=firsts, num_tokens=map(len, tokens)
    )
    (result,), plan = rig.step(operation)
    return result, plan or plan_pb2.Plan()


def blocks_of(result: cpb.OperationResult) -> list[int]:
    return columns.read(INT32, result.num_table_blocks, "num_blocks").tolist()


@pytest.fixture
def rig() -> PlanningRig:
    """Sequences 1 and 2 of 12 tokens each, written; their first blocks are published."""
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.admit(2, range(100, 112))
    rig.run()
    return rig


def test_a_slot_in_a_block_of_its_own_costs_no_block(rig: PlanningRig) -> None:
    before = rig.state(1).table
    result, plan = run(rig, (1, 12, 1, [12]), (2, 12, 2, []))
    assert blocks_of(result) == [2, 2]
    assert spans_of(plan.spans) == [(1, 12, 1), (2, 12, 2)]
    assert not plan.HasField("changes")
    assert rig.state(1).table == before
    rig.check()


def test_the_writer_of_a_shared_block_copies_it_first(rig: PlanningRig) -> None:
    rig.step(ops.fork(1, 3))
    shared = rig.state(1).table
    _, plan = run(rig, (3, 12, 1, [12]))
    copied = rig.state(3).table
    assert rig.state(1).table == shared
    assert copied[0] == shared[0]
    assert copied[1] != shared[1]
    ((source, destination),) = transfers_of(plan.transfers)
    assert (source[1], destination[1]) == (shared[1], copied[1])
    rig.check()


def test_tokens_alone_compute_nothing(rig: PlanningRig) -> None:
    result, plan = run(rig, (1, 12, 0, [12, 13]), (2, 12, 1, [112]))
    assert spans_of(plan.spans) == [(2, 12, 1)]
    assert blocks_of(result) == [2, 2]
    assert rig.state(1).num_tokens == 14


BAD_ITEMS: dict[str, tuple[tuple[int, int, int, list[int]], str]] = {
    "unknown sequence": ((9, 12, 1, []), "sequence_ids"),
    "negative slots": ((1, 12, -1, []), "num_slots"),
    "a negative token": ((1, 12, 1, [-1]), "token_ids"),
    "too early": ((1, 11, 1, []), "first_positions"),
    "too late": ((1, 13, 1, []), "first_positions"),
    "on the host": ((3, 4, 1, []), "sequence_ids"),
}


@pytest.mark.parametrize("reason", BAD_ITEMS)
def test_an_item_that_fails_names_its_column_and_spoils_no_other(
    rig: PlanningRig, reason: str
) -> None:
    rig.admit(3, range(200, 204))
    rig.step(ops.swap([3], "host"))
    bad, column = BAD_ITEMS[reason]
    before = [rig.state(i).num_tokens for i in (1, 2, 3)]
    result, plan = run(rig, bad, (2, 12, 1, []))
    (failure,) = result.failures
    assert (failure.item, failure.status) == (0, cpb.ITEM_STATUS_FAILED)
    assert failure.error.field == f"operations[0].append.{column}[0]"
    assert spans_of(plan.spans) == [(2, 12, 1)]
    assert [rig.state(i).num_tokens for i in (1, 2, 3)] == before
    rig.check()


def test_without_room_an_item_is_later_or_never_and_others_go_on(rig: PlanningRig) -> None:
    result, plan = run(rig, (1, 12, 60, []), (1, 12, 48, []), (2, 12, 1, []))
    assert [(failure.item, failure.status) for failure in result.failures] == [
        (0, cpb.ITEM_STATUS_NEVER),
        (1, cpb.ITEM_STATUS_LATER),
    ]
    assert result.failures[1].shortage.num_blocks_needed == 6
    assert spans_of(plan.spans) == [(2, 12, 1)]


@pytest.mark.parametrize(
    "column", ["first_positions", "num_slots", "num_tokens", "token_ids", "sequence_ids"]
)
def test_columns_that_do_not_fit_one_another_change_nothing(rig: PlanningRig, column: str) -> None:
    operation = ops.append(1, [12], 1, first_positions=12)
    setattr(operation.append, column, getattr(operation.append, column)[:-1])
    (result,), plan = rig.step(operation)
    (failure,) = result.failures
    assert failure.error.field == f"operations[0].append.{column}"
    assert rig.state(1).num_scheduled == 12
    assert plan is None


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 10), st.integers(0, 3)), max_size=12))
def test_sequences_grow_as_lists_do(steps: list[tuple[int, int, int]]) -> None:
    """Position by position, however slots, tokens and forks come."""
    rig = PlanningRig(64)
    model = {}
    for i in (1, 2):
        rig.admit(i, [i])
        model[i] = (1, 1)
    rig.step(ops.fork(1, 3))
    model[3] = model[1]
    for sequence_id, num_slots, num_tokens in steps:
        num_known, end = model[sequence_id]
        result, _ = run(rig, (sequence_id, end, num_slots, list(range(num_tokens))))
        assert not result.failures
        model[sequence_id] = (num_known + num_tokens, end + num_slots)
        rig.check()
    for sequence_id, (num_known, end) in model.items():
        state = rig.state(sequence_id)
        assert state.num_tokens == num_known
        assert state.num_scheduled == end
        assert len(state.table) == -(-end // BLOCK_SIZE)
