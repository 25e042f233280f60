"""What came of a step: one error for an item that was not done, and columns as values."""

from __future__ import annotations

import pytest

from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    NeverFitsError,
    PoolFullError,
    PositionMismatchError,
)
from kvplane.results import (
    AdmitResult,
    CachedBlock,
    Granted,
    ItemFailure,
    PoolMatch,
    SequenceState,
    SessionNews,
    StepResult,
    total_of,
)
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.error_codec import to_wire
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as types
from tests.helpers.refusals import refused

SHORTAGE = pb.Shortage(
    tier=types.TIER_DEVICE,
    num_blocks_needed=9,
    num_blocks_available=4,
    num_blocks_pending=2,
    reason=pb.SHORTAGE_REASON_BLOCKS,
)


def test_later_is_a_full_pool_and_says_how_long_to_wait() -> None:
    failure = pb.ItemFailure(status=pb.ITEM_STATUS_LATER, shortage=SHORTAGE)
    failure.shortage.retry_delay.FromMilliseconds(50)
    error = ItemFailure.from_proto(failure).error
    assert type(error) is PoolFullError
    assert error.retry_delay_s == 0.05
    assert "9 blocks of the device tier are needed and 4 are available, 2 more" in error.message


def test_an_admission_that_waits_says_where_in_line() -> None:
    failure = pb.ItemFailure(status=pb.ITEM_STATUS_LATER, shortage=SHORTAGE)
    failure.shortage.queue_position = 3
    error = ItemFailure.from_proto(failure).error
    assert type(error) is PoolFullError
    assert error.retry_delay_s is None
    assert error.message.endswith("the admission waits, at position 3 in the queue")


def test_never_does_not_fit_and_does_not_say_to_wait() -> None:
    error = ItemFailure.from_proto(
        pb.ItemFailure(status=pb.ITEM_STATUS_NEVER, shortage=SHORTAGE)
    ).error
    assert type(error) is NeverFitsError
    assert error.retry_delay_s is None
    assert "9 blocks" in error.message


def test_failed_is_the_error_that_the_control_plane_gave() -> None:
    field = "operations[0].append.first_positions[3]"
    given = to_wire(PositionMismatchError("7 positions are scheduled", field=field))
    error = ItemFailure.from_proto(pb.ItemFailure(status=pb.ITEM_STATUS_FAILED, error=given)).error
    assert type(error) is PositionMismatchError
    assert error.field == field


def test_a_status_of_a_later_release_is_no_success() -> None:
    assert type(ItemFailure.from_proto(pb.ItemFailure(item=3)).error) is InternalError


def test_a_step_of_which_all_items_were_done_passes() -> None:
    answer = pb.StepResponse(results=[pb.OperationResult(), pb.OperationResult()])
    result = StepResult(answer)
    assert result.raise_for_status() is result
    answer.results[1].failures.add(item=5, status=pb.ITEM_STATUS_LATER)
    with pytest.raises(PoolFullError):
        result.raise_for_status()


def test_an_operation_is_read_from_its_columns() -> None:
    message = pb.OperationResult(
        num_table_blocks=columns.pack(INT32, [3, 0]),
        failures=[pb.ItemFailure(item=1, status=pb.ITEM_STATUS_LATER, shortage=SHORTAGE)],
        admit=pb.AdmitResult(num_cached_tokens=16, num_blocks=2, num_scheduled_tokens=4),
    )
    (result,) = StepResult(pb.StepResponse(results=[message])).results
    assert result.num_table_blocks.tolist() == [3, 0]
    assert result.num_released_blocks.tolist() == []
    assert result.admit == AdmitResult(16, 2, 4)
    (failure,) = result.failures
    assert (failure.item, failure.is_later) == (1, True)
    assert failure.num_blocks_pending == SHORTAGE.num_blocks_pending
    assert isinstance(failure.error, PoolFullError)


def test_a_step_with_nothing_to_carry_out_has_no_plan() -> None:
    assert StepResult(pb.StepResponse()).plan is None
    plan = types.SignedPayload(payload=b"plan")
    assert StepResult(pb.StepResponse(plan=plan)).plan == plan


def states() -> pb.SequenceStates:
    return pb.SequenceStates(
        sequence_ids=columns.pack(INT64, [3, 2**40]),
        admitted_by=columns.pack(INT64, [1, 7]),
        num_tokens=columns.pack(INT32, [20, 30]),
        num_scheduled_tokens=columns.pack(INT32, [19, 29]),
        num_written_tokens=columns.pack(INT32, [18, 28]),
        num_cached_tokens=columns.pack(INT32, [16, 0]),
        num_blocks=columns.pack(INT32, [2, 3]),
        tiers=columns.pack(UINT8, [types.TIER_DEVICE, types.TIER_HOST]),
    )


def test_sequences_are_read_from_their_columns() -> None:
    assert SequenceState.all_from_proto(states()) == [
        SequenceState(3, 1, 20, 19, 18, 16, 2, types.TIER_DEVICE),
        SequenceState(2**40, 7, 30, 29, 28, 0, 3, types.TIER_HOST),
    ]
    assert SequenceState.all_from_proto(pb.SequenceStates()) == []


def test_columns_of_unequal_length_are_refused_by_name() -> None:
    message = states()
    message.num_blocks += b"\0\0\0\0"
    with refused(InvalidRequestError, "sequences.num_blocks"):
        SequenceState.all_from_proto(message)


def test_a_match_and_its_blocks_are_read_from_their_columns() -> None:
    blocks = ppb.PrefixBlocks(
        hashes=b"a" * 16 + b"b" * 16,
        tiers=columns.pack(UINT8, [types.TIER_DEVICE, types.TIER_HOST]),
        indices=columns.pack(INT32, [7, 0]),
        generations=columns.pack(INT64, [2**40, 1]),
        ref_counts=columns.pack(INT32, [3, 0]),
        num_hits=columns.pack(INT64, [12, 1]),
        ages_ms=columns.pack(INT64, [2500, 90]),
        idle_ms=columns.pack(INT64, [0, 80]),
        priorities=columns.pack(UINT8, [0, 100]),
    )
    message = ppb.PoolMatch(
        pool_id="p", num_device_tokens=16, num_host_tokens=16, revision=9, blocks=blocks
    )
    match = PoolMatch.from_proto(message)
    assert match.blocks == (
        CachedBlock(b"a" * 16, types.TIER_DEVICE, 7, 2**40, 3, 12, 2.5, 0.0, 0),
        CachedBlock(b"b" * 16, types.TIER_HOST, 0, 1, 0, 1, 0.09, 0.08, 100),
    )
    assert match == PoolMatch("p", 16, 16, 9, match.blocks)
    assert match.num_cached_tokens == 32
    message.blocks.ref_counts = b""
    with refused(InvalidRequestError, "ref_counts"):
        PoolMatch.from_proto(message)


def test_news_say_what_was_granted_cut_and_asked_for() -> None:
    result = pb.StepResponse()
    result.news.granted_sequence_ids = columns.pack(INT64, [4])
    result.news.granted_num_cached_tokens = columns.pack(INT32, [16])
    result.news.granted_num_blocks = columns.pack(INT32, [3])
    result.news.cut_sequence_ids = columns.pack(INT64, [9, 8])
    result.news.cut_reasons = columns.pack(UINT8, [pb.CUT_REASON_GROWTH, pb.CUT_REASON_TURN])
    result.news.num_blocks_asked = 12
    result.news.asked_within.FromMilliseconds(1500)
    result.news.asked_sequence_ids = columns.pack(INT64, [7])
    assert SessionNews.from_proto(result.news) == SessionNews(
        granted=(Granted(4, 16, 3),),
        cut={9: pb.CUT_REASON_GROWTH, 8: pb.CUT_REASON_TURN},
        num_blocks_asked=12,
        deadline_s=1.5,
        sequences_asked=(7,),
    )
    assert SessionNews.from_proto(result.news) == StepResult(result).news
    result.news.cut_reasons = b""
    with refused(InvalidRequestError, "cut_reasons"):
        SessionNews.from_proto(result.news)


def test_an_answer_without_news_says_that_nothing_happened() -> None:
    assert SessionNews.from_proto(pb.News()) == SessionNews((), {}, 0, 0.0, ())


def test_a_counter_is_summed_over_its_labels() -> None:
    counters = {
        'hits_total{tier="device"}': 2,
        'hits_total{tier="host"}': 3,
        "hits_total_of_all": 9,
    }
    assert (total_of(counters, "hits_total"), total_of(counters, "hits")) == (5, 0)
