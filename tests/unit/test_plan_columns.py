"""The columns of a plan, and what of earlier transfers an abort must know."""

from __future__ import annotations

import pytest
from core_data_plane import DEVICE, HOST, Block, Span, changes_of, spans_of, transfers_of

from control_plane.planning.steps import checks
from control_plane.planning.steps.plan_columns import (
    Ref,
    SpanColumns,
    TableChangeColumns,
    TransferColumns,
)
from kvplane.errors import InvalidRequestError
from kvplane.v1 import types_pb2 as tpb


def test_what_is_empty_has_no_message() -> None:
    for columns in (TableChangeColumns(), TransferColumns(), SpanColumns()):
        assert columns.message() is None
        assert not columns


def test_columns_are_read_as_they_were_written() -> None:
    changes, transfers, spans = TableChangeColumns(), TransferColumns(), SpanColumns()
    changes.set(7, DEVICE, 2, [5, 6], [1, 2**40], b"\0\1")
    changes.fork(8, 7, 3)
    changes.drop(7)
    changes.set(9, HOST, 0, [4], [3], b"\1", replace=True)
    transfers.add((DEVICE, 5, 1), (HOST, 4, 3))
    spans.sequence_ids.append(2**62)
    spans.first_positions.append(2**33)
    spans.num_tokens.append(1)
    plan = tpb.Plan(changes=changes.message(), transfers=transfers.message(), spans=spans.message())
    first, fork, drop, replaced = changes_of(plan)
    assert first == (
        tpb.TABLE_CHANGE_KIND_SET,
        7,
        2,
        2,
        0,
        [Block(DEVICE, 5, 1), Block(DEVICE, 6, 2**40)],
        [False, True],
    )
    assert fork == (tpb.TABLE_CHANGE_KIND_FORK, 8, 0, 3, 7, [], [])
    assert drop == (tpb.TABLE_CHANGE_KIND_DROP, 7, 0, 0, 0, [], [])
    assert replaced.kind == tpb.TABLE_CHANGE_KIND_REPLACE
    assert replaced.blocks == [Block(HOST, 4, 3)]
    assert transfers_of(plan) == [(Block(DEVICE, 5, 1), Block(HOST, 4, 3))]
    assert spans_of(plan) == [Span(2**62, 2**33, 1)]


def test_a_copy_of_a_copy_is_traced_to_where_its_content_was_at_first() -> None:
    one, two, three = (DEVICE, 1, 1), (HOST, 2, 1), (DEVICE, 3, 1)
    first, second = TransferColumns(), TransferColumns()
    first.add(one, two)
    second.add(two, three)
    origins: dict[Ref, Ref] = {}
    first.trace(origins)
    second.trace(origins)
    assert origins == {two: one, three: one}


def test_tokens_are_counted_before_they_are_read() -> None:
    checks.token_columns([1, 0, 2], bytes(12), at_least=0, at="")
    for num_tokens, num_bytes, field in (
        ([1, -1, 2], 8, "in.num_tokens[1]"),
        ([1, 2], 8, "in.token_ids"),
        ([2**31 - 1] * 3, 8, "in.token_ids"),
        ([], 4, "in.token_ids"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            checks.token_columns(num_tokens, bytes(num_bytes), at_least=0, at="in.")
        assert refused.value.field == field
    assert checks.first_negative(b"\1\0\0\0\0\0\0\x80") == 1
    assert checks.first_negative(b"\xff\xff\xff\x7f") is None
