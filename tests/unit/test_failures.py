"""A failed item says where it stands in the request, why, and for a shortage what is missing."""

from __future__ import annotations

import pytest

from control_plane.planning.steps.failures import Failures
from control_plane.planning.steps.room import NoRoom
from kvplane.error_messages import from_wire
from kvplane.errors import InvalidRequestError, PositionMismatchError
from kvplane.v1 import control_pb2 as cpb

AT = "operations[2].append"


@pytest.mark.parametrize(
    ("field", "item", "want"),
    [
        ("num_slots", 17, f"{AT}.num_slots[17]"),
        ("num_tokens[3]", 3, f"{AT}.num_tokens[3]"),
        ("num_tokens", None, f"{AT}.num_tokens"),
        ("", 17, f"{AT}[17]"),
        ("", None, AT),
    ],
)
def test_the_field_is_named_from_the_request_on(field: str, item: int | None, want: str) -> None:
    failures = Failures(AT)
    failures.add(InvalidRequestError("is wrong", field=field), item)
    (failure,) = failures.items
    assert (failure.item, failure.status) == (item or 0, cpb.OPERATION_STATUS_FAILED)
    assert failure.error.field == want


def test_an_error_keeps_its_type_and_the_callers_own_is_not_changed() -> None:
    failures = Failures(AT)
    error = PositionMismatchError("is at 3", field="first_positions")
    failures.add(error, 1)
    assert type(from_wire(failures.items[0].error)) is PositionMismatchError
    assert error.field == "first_positions"


def test_a_shortage_is_no_error() -> None:
    failures = Failures(AT)
    shortage = cpb.Shortage(num_blocks_needed=4)
    failures.add(NoRoom(cpb.OPERATION_STATUS_LATER, shortage), 5)
    (failure,) = failures.items
    assert (failure.item, failure.status) == (5, cpb.OPERATION_STATUS_LATER)
    assert failure.shortage == shortage
    assert not failure.HasField("error")
