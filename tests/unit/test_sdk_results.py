"""What came of a step: one error for an item that was not done, and columns as values."""

from __future__ import annotations

import pytest

from kvplane import columns
from kvplane.columns import INT32, INT64, UINT8
from kvplane.error_codec import to_wire
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    NeverFitsError,
    PoolFullError,
    PositionMismatchError,
)
from kvplane.results import SequenceState, error_of, require_done, sequence_states
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as types

SHORTAGE = pb.Shortage(
    tier=types.TIER_DEVICE,
    num_blocks_needed=9,
    num_blocks_available=4,
    num_blocks_pending=2,
    reason=pb.SHORTAGE_REASON_BLOCKS,
)


def test_later_is_a_full_pool_and_says_how_long_to_wait() -> None:
    failure = pb.ItemFailure(status=pb.OPERATION_STATUS_LATER, shortage=SHORTAGE)
    failure.shortage.retry_delay.FromMilliseconds(50)
    error = error_of(failure)
    assert type(error) is PoolFullError
    assert error.retry_delay_s == 0.05
    assert "9 blocks of the device tier are needed and 4 are available, 2 more" in error.message


def test_never_does_not_fit_and_does_not_say_to_wait() -> None:
    error = error_of(pb.ItemFailure(status=pb.OPERATION_STATUS_NEVER, shortage=SHORTAGE))
    assert type(error) is NeverFitsError
    assert error.retry_delay_s is None
    assert "9 blocks" in error.message


def test_failed_is_the_error_that_the_control_plane_gave() -> None:
    field = "operations[0].append.first_positions[3]"
    given = to_wire(PositionMismatchError("7 positions are scheduled", field=field))
    error = error_of(pb.ItemFailure(status=pb.OPERATION_STATUS_FAILED, error=given))
    assert type(error) is PositionMismatchError
    assert error.field == field


def test_a_status_of_a_later_release_is_no_success() -> None:
    assert type(error_of(pb.ItemFailure(item=3))) is InternalError


def test_a_step_of_which_all_items_were_done_passes() -> None:
    result = pb.StepResult(results=[pb.OperationResult(), pb.OperationResult()])
    assert require_done(result) is result
    result.results[1].failures.add(item=5, status=pb.OPERATION_STATUS_LATER)
    with pytest.raises(PoolFullError):
        require_done(result)


def states() -> pb.SequenceStates:
    return pb.SequenceStates(
        sequence_ids=columns.pack(INT64, [3, 2**40]),
        admitted_by=columns.pack(INT64, [1, 7]),
        num_tokens=columns.pack(INT64, [20, 30]),
        num_scheduled_tokens=columns.pack(INT64, [19, 29]),
        num_written_tokens=columns.pack(INT64, [18, 28]),
        num_cached_tokens=columns.pack(INT64, [16, 0]),
        num_blocks=columns.pack(INT32, [2, 3]),
        tiers=columns.pack(UINT8, [types.TIER_DEVICE, types.TIER_HOST]),
    )


def test_sequences_are_read_from_their_columns() -> None:
    assert sequence_states(states()) == [
        SequenceState(3, 1, 20, 19, 18, 16, 2, types.TIER_DEVICE),
        SequenceState(2**40, 7, 30, 29, 28, 0, 3, types.TIER_HOST),
    ]
    assert sequence_states(pb.SequenceStates()) == []


def test_columns_of_unequal_length_are_refused_by_name() -> None:
    message = states()
    message.num_blocks += b"\0\0\0\0"
    with pytest.raises(InvalidRequestError) as caught:
        sequence_states(message)
    assert caught.value.field == "sequences.num_blocks"
