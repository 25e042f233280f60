"""The columns of a plan: what was put in is what the message says, in that order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from planning_rig import DEVICE, HOST, entries_of, spans_of, transfers_of

from control_plane.planning.plan_columns import (
    Ref,
    SpanColumns,
    TableChangeColumns,
    TransferColumns,
)
from kvplane import columns
from kvplane.columns import INT32, INT64, UINT8
from kvplane.v1 import types_pb2 as tpb

REFS = st.tuples(st.sampled_from([DEVICE, HOST]), st.integers(0, 4), st.integers(1, 3))


def test_columns_that_are_empty_make_no_message() -> None:
    for made in (TableChangeColumns(), TransferColumns(), SpanColumns()):
        assert len(made) == 0
        assert made.message() is None


def test_changes_of_every_kind_stand_in_the_order_in_which_they_were_made() -> None:
    changes = TableChangeColumns()
    changes.set(5, DEVICE, 2, [9, 8], [1, 2], b"\1\0")
    changes.fork(6, 5, 3)
    changes.drop(5)
    changes.set(6, HOST, 0, [7], [2**40], b"\1", replace=True)
    message = changes.message()
    assert message is not None
    assert len(changes) == 4
    assert list(message.kinds) == [
        tpb.TABLE_CHANGE_KIND_SET,
        tpb.TABLE_CHANGE_KIND_FORK,
        tpb.TABLE_CHANGE_KIND_DROP,
        tpb.TABLE_CHANGE_KIND_REPLACE,
    ]
    for kind, column, want in (
        (INT64, message.sequence_ids, [5, 6, 5, 6]),
        (UINT8, message.tiers, [DEVICE, 0, 0, HOST]),
        (INT32, message.first_blocks, [2, 0, 0, 0]),
        (INT32, message.num_blocks, [2, 3, 0, 1]),
        (INT64, message.parent_sequence_ids, [5]),
    ):
        assert list(columns.read(kind, column, "column")) == want
    assert entries_of(message) == [(9, 1, True), (8, 2, False), (7, 2**40, True)]


@given(st.lists(st.tuples(REFS, REFS), min_size=1))
def test_transfers_are_read_as_they_were_added(pairs: list[tuple[Ref, Ref]]) -> None:
    transfers = TransferColumns()
    for source, destination in pairs:
        transfers.add(source, destination)
    assert list(transfers) == pairs
    message = transfers.message()
    assert message is not None
    assert transfers_of(message) == pairs


@given(st.lists(st.tuples(REFS, REFS)))
def test_a_blocks_origin_is_where_its_content_was_before_all_transfers(
    pairs: list[tuple[Ref, Ref]],
) -> None:
    content: dict[Ref, Ref] = {}  # as if every block held its own name, and was copied
    transfers, origins = TransferColumns(), dict[Ref, Ref]()
    for source, destination in pairs:
        transfers.add(source, destination)
        content[destination] = content.get(source, source)
    transfers.trace(origins)
    assert origins == content


def test_origins_are_traced_through_several_plans() -> None:
    first, second = TransferColumns(), TransferColumns()
    first.add((DEVICE, 1, 1), (HOST, 2, 1))
    second.add((HOST, 2, 1), (DEVICE, 3, 1))
    origins: dict[Ref, Ref] = {}
    for transfers in (first, second):
        transfers.trace(origins)
    assert origins[DEVICE, 3, 1] == (DEVICE, 1, 1)


def test_spans_are_as_wide_as_the_wire() -> None:
    spans = SpanColumns()
    spans.sequence_ids.append(2**63 - 1)
    spans.first_positions.append(2**40)
    spans.num_tokens.append(2**31 - 1)
    message = spans.message()
    assert message is not None
    assert spans_of(message) == [(2**63 - 1, 2**40, 2**31 - 1)]
