"""Appends: sequences grow, each item by itself, and what fails changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_rig import BLOCK_SIZE, PlanningRig, spans_of, transfers_of

from control_plane.planning.steps.append import append
from control_plane.planning.steps.draft import Draft
from control_plane.planning.steps.failures import Failures
from kvplane import columns, ops
from kvplane.columns import INT32
from kvplane.errors import InvalidRequestError
from kvplane.v1 import control_pb2 as cpb


@dataclass
class Appended:
    """What came of one Append."""

    draft: Draft
    num_blocks: list[int]
    failures: list[cpb.ItemFailure] = field(default_factory=list)

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        message = self.draft.spans.message()
        return [] if message is None else spans_of(message)


def run(rig: PlanningRig, *items: tuple[int, int, int, list[int]]) -> Appended:
    """Append (sequence, first position, slots, tokens) of each item."""
    ids, firsts, slots, tokens = zip(*items, strict=True)
    given_tokens = [token for of_item in tokens for token in of_item]
    operation = ops.appends(ids, firsts, slots, map(len, tokens), given_tokens)
    draft, failures = rig.draft(), Failures("operations[0].append")
    result = append(draft, operation.append, failures)
    return Appended(
        draft, list(columns.read(INT32, result.num_blocks, "num_blocks")), failures.items
    )


@pytest.fixture
def rig() -> PlanningRig:
    """Sequences 1 and 2 of 12 tokens each, written; their first blocks are published."""
    rig = PlanningRig()
    rig.admit(1, range(12))
    rig.admit(2, range(100, 112))
    rig.run()
    return rig


def test_a_slot_in_a_block_of_its_own_costs_no_block(rig: PlanningRig) -> None:
    before = list(rig.session.sequences[1].table)
    done = run(rig, (1, 12, 1, [12]), (2, 12, 2, []))
    assert done.num_blocks == [2, 2]
    assert done.spans == [(1, 12, 1), (2, 12, 2)]
    assert not done.draft.changes
    assert rig.session.sequences[1].table == before
    done.draft.finish()
    rig.check()


def test_the_writer_of_a_shared_block_copies_it_first(rig: PlanningRig) -> None:
    rig.step(ops.fork(1, 3))
    shared = list(rig.session.sequences[1].table)
    done = run(rig, (3, 12, 1, [12]))
    child = rig.session.sequences[3]
    assert rig.session.sequences[1].table == shared
    assert child.table[0] == shared[0]
    assert child.table[1] != shared[1]
    message = done.draft.transfers.message()
    assert message is not None
    ((source, destination),) = transfers_of(message)
    assert (source[1], destination[1]) == (shared[1], child.table[1])
    done.draft.finish()
    rig.check()


def test_tokens_alone_compute_nothing(rig: PlanningRig) -> None:
    done = run(rig, (1, 12, 0, [12, 13]), (2, 12, 1, [112]))
    assert done.spans == [(2, 12, 1)]
    assert done.num_blocks == [2, 2]
    assert rig.session.sequences[1].num_tokens == 14


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
    rig.step(ops.swap_out([3]))
    bad, column = BAD_ITEMS[reason]
    before = [bytes(sequence.tokens) for sequence in rig.session.sequences.values()]
    done = run(rig, bad, (2, 12, 1, []))
    (failure,) = done.failures
    assert (failure.item, failure.status) == (0, cpb.OPERATION_STATUS_FAILED)
    assert failure.error.field == f"operations[0].append.{column}[0]"
    assert done.spans == [(2, 12, 1)]
    assert [bytes(sequence.tokens) for sequence in rig.session.sequences.values()] == before
    done.draft.finish()
    rig.check()


def test_without_room_an_item_is_later_or_never_and_others_go_on(rig: PlanningRig) -> None:
    done = run(rig, (1, 12, 60, []), (1, 12, 48, []), (2, 12, 1, []))
    assert [(failure.item, failure.status) for failure in done.failures] == [
        (0, cpb.OPERATION_STATUS_NEVER),
        (1, cpb.OPERATION_STATUS_LATER),
    ]
    assert done.failures[1].shortage.num_blocks_needed == 6
    assert done.spans == [(2, 12, 1)]


@pytest.mark.parametrize(
    "column", ["first_positions", "num_slots", "num_tokens", "token_ids", "sequence_ids"]
)
def test_columns_that_do_not_fit_one_another_change_nothing(rig: PlanningRig, column: str) -> None:
    message = ops.append(1, [12], 1, first_position=12).append
    setattr(message, column, getattr(message, column)[:-1])
    failures: Any = Failures("")
    draft = rig.draft()
    with pytest.raises(InvalidRequestError) as refused:
        append(draft, message, failures)
    assert refused.value.field == column
    assert rig.session.sequences[1].num_scheduled == 12
    assert draft.finish() is None


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 10), st.integers(0, 3)), max_size=12))
def test_sequences_grow_as_lists_do(steps: list[tuple[int, int, int]]) -> None:
    """Position by position, however slots, tokens and forks come."""
    rig = PlanningRig(64)
    model = {}
    for i in (1, 2):
        rig.admit(i, [i])
        model[i] = ([i], 1)
    rig.step(ops.fork(1, 3))
    model[3] = model[1]
    for sequence_id, num_slots, num_tokens in steps:
        tokens, end = model[sequence_id]
        given_tokens = list(range(num_tokens))
        done = run(rig, (sequence_id, end, num_slots, given_tokens))
        assert not done.failures
        done.draft.finish()
        model[sequence_id] = (tokens + given_tokens, end + num_slots)
        rig.check()
    for sequence_id, (tokens, end) in model.items():
        sequence = rig.session.sequences[sequence_id]
        assert sequence.tokens == ops.pack_tokens(tokens)
        assert sequence.num_scheduled == end
        assert len(sequence.table) == -(-end // BLOCK_SIZE)
