"""A failed item says where it stands in the request, why, and for a shortage what is missing."""

from __future__ import annotations

import pytest
from kvplane_blocks import ColumnError, _native

from control_plane.sessions.session import Session
from control_plane.steps.failures import (
    add_error,
    add_failures,
    error_of,
    error_of_columns,
)
from control_plane.steps.operation import Failure
from control_plane.steps.operations import DEFERRED_TOKENS, OPERATIONS
from kvplane.errors import InvalidRequestError, PositionMismatchError, SequenceNotFoundError
from kvplane.wire.error_messages import from_wire
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import DEVICE
from tests.helpers.core.core_model import World

AT = "operations[2].append"


@pytest.fixture
def session() -> Session:
    world = World()
    return world.engine().session


@pytest.mark.parametrize(("field", "want"), [("num_slots", f"{AT}.num_slots"), ("", AT)])
def test_the_field_is_named_from_the_request_on(field: str, want: str) -> None:
    result = cpb.OperationResult()
    error = InvalidRequestError("is wrong", field=field)
    add_error(result, AT, error)
    (failure,) = result.failures
    assert (failure.item, failure.status) == (0, cpb.ITEM_STATUS_FAILED)
    assert failure.error.field == want
    assert error.field == field, "the caller's own is not changed"


@pytest.mark.parametrize(("index", "want"), [(-1, "at.num_tokens"), (3, "at.num_tokens[3]")])
def test_a_column_that_cannot_be_read_is_named_with_its_element(index: int, want: str) -> None:
    error = error_of_columns(ColumnError("num_tokens", index, "must be at least 1"), at="at.")
    assert (error.field, error.message) == (want, "must be at least 1")


def test_items_keep_their_places_and_errors_their_types(session: Session) -> None:
    result = cpb.OperationResult()
    refused: list[Failure] = [(1, _native.POSITION, 7, 12, 11), (4, _native.LATER, 3, 2, DEVICE)]
    add_failures(result, session, AT, OPERATIONS["append"], refused)
    first, second = result.failures
    assert (first.item, second.item) == (1, 4)
    assert type(from_wire(first.error)) is PositionMismatchError
    assert first.error.field == f"{AT}.first_positions[1]"
    assert second.status == cpb.ITEM_STATUS_LATER
    assert (second.shortage.num_blocks_needed, second.shortage.num_blocks_available) == (3, 2)
    assert not second.HasField("error")


def test_an_operation_that_is_one_item_names_its_columns_element_by_element(
    session: Session,
) -> None:
    result, at = cpb.OperationResult(), "operations[0].swap"
    add_failures(result, session, at, OPERATIONS["swap"], [(3, _native.NOT_FOUND, 9, 0, 0)])
    (failure,) = result.failures
    assert failure.item == 0
    assert failure.error.field == f"{at}.sequence_ids[3]"


def test_every_code_of_the_core_has_an_error(session: Session) -> None:
    shortages = {_native.LATER, _native.NEVER, _native.LATER_HEADROOM}
    shortages |= {_native.LATER_QUOTA, _native.NEVER_QUOTA}
    numbers = {
        name: value
        for name, value in vars(_native).items()
        if name.isupper() and not name.startswith("FAMILY_")
    }
    codes = set(numbers.values()) - shortages
    assert len(codes) >= 15
    for code in codes:
        for operation in (*OPERATIONS.values(), DEFERRED_TOKENS):
            assert error_of(session, operation, (0, code, 1, 1, 1)).field
    missing = error_of(session, OPERATIONS["fork"], (0, _native.NOT_FOUND, 5, 0, 0))
    assert type(missing) is SequenceNotFoundError
    assert missing.field == "parent_sequence_ids"
