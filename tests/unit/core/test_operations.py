"""Operations of a step: what each does, what it refuses, and how its failures are named.

What the native core decides is tested in ``tests/unit/blocks``; here are the messages around it.
"""

from __future__ import annotations

import pytest

from control_plane.steps.operations import read_operations
from kvplane import ops
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    PositionMismatchError,
    QuotaExceededError,
    SequenceExistsError,
    SequenceNotFoundError,
    SequenceSwappedError,
    TooManyPlansInFlightError,
)
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_messages import (
    BLOCK,
    DEVICE,
    HOST,
    allocated_of,
    pack,
    spans_of,
)
from tests.helpers.core.core_model import (
    FAILED,
    LATER,
    NEVER,
    OK,
    World,
    error_in,
    only,
    status_of,
)


def int32(column: bytes) -> list[int]:
    return columns.read(INT32, column, "column").tolist()


# What is refused

OVERFLOW = ops.append(1, pack([1, 2]), 1, first_positions=4)
OVERFLOW.append.num_tokens = columns.pack(INT32, [1])
CUT_OFF = ops.append(1, b"", 1, first_positions=4)
CUT_OFF.append.sequence_ids += b"x"
NO_TIER = cpb.Operation(swap=cpb.Swap(sequence_ids=columns.pack(INT64, [1])))
# By the error: operations, and the fields that it names.
WRONG: dict[type[KvplaneError], list[tuple[cpb.Operation, str]]] = {
    InvalidRequestError: [
        (ops.admit(0, [1]), "sequence_id"),
        (ops.admit(-1, [1]), "sequence_id"),
        (ops.admit(2, b""), "token_ids"),
        (ops.admit(2, b"abc"), "token_ids"),
        (ops.admit(2, [-1]), "token_ids[0]"),
        (ops.admit(2, [1], num_compute_tokens=-1), "num_compute_tokens"),
        (ops.admit(2, [1], max_total_tokens=-(2**31)), "max_total_tokens"),
        (ops.admit(2, [1], fork_sequence_ids=[4, 0]), "fork_sequence_ids[1]"),
        (ops.admit(2, [1], fork_sequence_ids=bytes(7)), "fork_sequence_ids"),
        (ops.append(1, b"", -1, first_positions=4), "num_slots[0]"),
        (ops.append(1, [-1], 1, first_positions=4), "token_ids[0]"),
        (ops.append(1, (), 1, first_positions=4, num_tokens=-1), "num_tokens[0]"),
        (ops.append(1, b"abc", 1, first_positions=4, num_tokens=1), "token_ids"),
        (OVERFLOW, "token_ids"),
        (CUT_OFF, "sequence_ids"),
        *(
            (ops.admit(2, [1], ends_with_plan=True, **{field: value}), field)
            for field, value in (
                ("num_compute_tokens", 0),
                ("fork_sequence_ids", [4]),
                ("wait", True),
            )
        ),
        # The layout has no states.
        (ops.admit(2, [1] * 8, checkpoint_position=8), "checkpoint_position"),
        (
            ops.append(1, [9] * 8, 8, first_positions=4, checkpoint_positions=8),
            "checkpoint_positions[0]",
        ),
        (
            ops.append(1, [9], 1, first_positions=4, checkpoint_positions=[0, 0]),
            "checkpoint_positions",
        ),
        (
            ops.append(1, [9], 1, first_positions=4, num_lookahead_slots=[-1]),
            "num_lookahead_slots[0]",
        ),
        (
            ops.append(1, [9], 1, first_positions=4, num_lookahead_slots=[1, 1]),
            "num_lookahead_slots",
        ),
        (ops.append([1, 1], (), 0, first_positions=[4]), "first_positions"),
        (ops.append([1, 1], (), [0], first_positions=4), "num_slots"),
        (ops.append([1, 1], (), 0, first_positions=4, num_tokens=[0]), "num_tokens"),
        (ops.fork(1, 0), "sequence_ids[0]"),
        (ops.fork([1, 1], [2]), "parent_sequence_ids"),
        (ops.free(b"1234"), "sequence_ids"),
        (ops.truncate(1, 0), "num_tokens[0]"),
        (ops.truncate(1, 5), "num_tokens[0]"),
        (ops.truncate(1, [5, 5]), "num_tokens"),
        (NO_TIER, "tier"),
        (ops.swap([], "host"), "sequence_ids"),
        (ops.swap([1, 1], "host"), "sequence_ids[1]"),
        (cpb.Operation(), ""),
    ],
    PositionMismatchError: [
        (ops.append(1, [9], 1, first_positions=3), "first_positions[0]"),
        (ops.append(1, [9], 1, first_positions=5), "first_positions[0]"),
        (ops.append(1, [9], 0, first_positions=-1), "first_positions[0]"),
    ],
    SequenceExistsError: [
        (ops.admit(1, [1]), "sequence_id"),
        (ops.admit(2, [1], fork_sequence_ids=[4, 1]), "fork_sequence_ids[1]"),
        (ops.admit(2, [1], fork_sequence_ids=[4, 2]), "fork_sequence_ids[1]"),
        (ops.admit(2, [1], fork_sequence_ids=[4, 4]), "fork_sequence_ids[1]"),
        (ops.fork(1, 1), "sequence_ids[0]"),
    ],
    SequenceNotFoundError: [
        (ops.append(9, first_positions=0), "sequence_ids[0]"),
        (ops.fork(9, 2), "parent_sequence_ids[0]"),
        (ops.free([9]), "sequence_ids[0]"),
        (ops.truncate(9, 1), "sequence_ids[0]"),
        (ops.swap([1, 9], "host"), "sequence_ids[1]"),
    ],
    SequenceSwappedError: [
        (ops.append(3, [1], first_positions=4), "sequence_ids[0]"),
        (ops.swap([1, 3], "host"), "sequence_ids[1]"),
        (ops.swap([1], "device"), "sequence_ids[0]"),
    ],
}


@pytest.mark.parametrize(
    ("operation", "field", "error"),
    [(*row, error) for error, rows in WRONG.items() for row in rows],
)
def test_a_wrong_operation_fails_alone_and_names_its_field(
    operation: cpb.Operation, field: str, error: type[KvplaneError]
) -> None:
    engine = World().engine()
    engine.admit(1, range(4))
    engine.admit(3, range(4))
    engine.do(ops.swap([3], "host"))
    before = engine.everything()
    answer = engine.step(ops.free([]), operation)
    other, result = answer.results
    assert not other.failures
    (failure,) = result.failures
    assert (failure.item, failure.status) == (0, FAILED)
    assert type(error_in(result)) is error
    name = operation.WhichOneof("operation")
    assert failure.error.field == "operations[1]" + (f".{name}.{field}" if name else "")
    assert not answer.HasField("plan")
    assert engine.everything() == before
    engine.world.core.check_integrity()


def test_items_of_one_operation_fail_one_by_one_in_sparse_failures() -> None:
    engine = World(max_sequences=7).engine()
    for i in range(1, 6):
        engine.admit(i, [i] * 6)
    append = ops.append(
        [1, 9, 2, 3, 1, 4],
        pack([10, 11, 12, 13, 14, 15, 16, 17]),
        [1, 1, 1, 1, 1, 0],
        first_positions=[6, 6, 6, 5, 7, 6],
        num_tokens=[1, 1, 1, 1, 1, 3],
    )
    forks = ops.fork([5, 9, 5, 5, 5], [6, 7, 5, 7, 8])
    frees = ops.free([4, 4, 1, 6])
    appended, forked, freed = engine.step(append, forks, frees).results
    assert [(failure.item, failure.error.field) for failure in appended.failures] == [
        (1, "operations[0].append.sequence_ids[1]"),
        (3, "operations[0].append.first_positions[3]"),
        (4, "operations[0].append.num_slots[4]"),
    ]
    assert int32(appended.num_table_blocks) == [1, 0, 1, 0, 0, 1]
    assert [failure.item for failure in forked.failures] == [1, 2, 4]
    assert forked.failures[2].error.reason == "QUOTA_EXCEEDED"
    assert int32(forked.num_table_blocks) == [1, 0, 0, 1, 0]
    assert [failure.error.reason for failure in freed.failures] == [
        "SEQUENCE_NOT_FOUND",
        "SEQUENCE_BUSY",
    ]
    assert int32(freed.num_released_blocks) == [1, 0, 0, 0]
    assert spans_of(engine.queue[-1].plan) == [(1, 6, 1), (2, 6, 1)]
    assert engine.state(1).num_tokens == 7
    engine.run_all()
    engine.settle()
    engine.world.core.check_integrity()


# Bounds


def test_items_are_counted_by_their_columns_and_each_operation_as_one_at_least() -> None:
    table = [
        (cpb.Operation(), 1),
        (ops.admit(1, []), 1),
        (ops.admit(1, [], fork_sequence_ids=[2]), 2),
        (ops.free([]), 1),
        (ops.free([1, 2, 3]), 3),
        (ops.swap([1, 2], "host"), 2),
        (ops.fork(1, [2, 3]), 2),
        (ops.append([1, 2], (), 1, first_positions=0), 2),
    ]
    everything = [operation for operation, _ in table], sum(num for _, num in table)
    for operations, num in (*(([operation], num) for operation, num in table), everything):
        assert len(read_operations(operations, num)) == len(operations)
        with pytest.raises(InvalidRequestError, match=f"must have at most {num - 1} items"):
            read_operations(operations, num - 1)


def test_a_step_has_a_bounded_number_of_items() -> None:
    engine = World(max_operations=4).engine()
    engine.admit(1, range(4))
    before = engine.everything()
    with pytest.raises(InvalidRequestError, match="operations: must have at most 4 items"):
        engine.step(ops.free([7, 8, 9]), ops.free([7]), ops.admit(2, [1]))
    assert engine.everything() == before
    with pytest.raises(InvalidRequestError, match=r"deferred_tokens\.sequence_ids"):
        engine.submit(deferred=ops.deferred_tokens([1] * 5, [1] * 5, [3] * 5, [1] * 5, [3] * 5))
    with pytest.raises(InvalidRequestError, match="receipts: must be at most 4"):
        engine.submit([tpb.SignedPayload()] * 5)
    assert status_of(engine.step(ops.free([7, 8, 9]), ops.admit(2, [1])).results[1]) == OK


def test_a_session_has_a_bounded_number_of_table_entries() -> None:
    engine = World(max_table_entries=7).engine()
    engine.admit(1, range(2 * BLOCK))
    forked = only(engine.step(ops.fork(1, [2, 3, 4])))
    assert [failure.item for failure in forked.failures] == [2]
    assert type(error_in(forked)) is QuotaExceededError


def test_plans_in_flight_are_bounded_and_tokens_alone_make_none() -> None:
    engine = World(max_plans_in_flight=2, watermark=0.0).engine()
    assert not engine.step().HasField("plan")
    engine.step(ops.admit(1, [1]))
    engine.step(engine.growth(1, num_slots=1))
    with pytest.raises(TooManyPlansInFlightError):
        engine.step(engine.growth(1, num_slots=1))
    engine.step(engine.growth(1, [5]))
    engine.run_all()
    engine.step(engine.growth(1, num_slots=1), receipts=engine.receipts)
    assert engine.queue


def test_only_an_append_of_tokens_alone_makes_no_plan() -> None:
    alone = ops.append([1, 2], [5], 0, first_positions=0, num_tokens=[1, 0])
    others = [
        ops.append([1, 2], (), [0, 1], first_positions=0),
        ops.free([1]),
        ops.fork(1, 2),
        cpb.Operation(),
    ]
    may_plan = [named.may_plan(message) for named, message in read_operations([alone, *others], 9)]
    assert may_plan == [False, True, True, True, True]


# What is done


def test_an_admission_shares_what_is_cached_and_computes_the_rest() -> None:
    engine = World().engine()
    engine.admit(1, range(12))
    prompt = [*range(8), *range(50, 60)]
    result = engine.step(ops.admit(2, prompt))
    assert only(result).admit == cpb.AdmitResult(
        num_cached_tokens=8, num_blocks=3, num_scheduled_tokens=10
    )
    plan = engine.queue[0].plan
    assert engine.table(2)[0] == engine.table(1)[0]
    assert allocated_of(plan) == engine.blocks(2)[1:]
    assert spans_of(plan) == [(2, 8, 10)]
    parts = only(engine.step(ops.admit(3, prompt, skip_prefix_lookup=True, num_compute_tokens=5)))
    assert (parts.admit.num_cached_tokens, parts.admit.num_scheduled_tokens) == (0, 5)
    counters = engine.world.observed().counters
    assert (counters.num_lookup_tokens, counters.num_hit_tokens) == (12 + 18, 8)


def test_the_revision_counts_publications_and_evictions() -> None:
    engine = World(num_device=4).engine()
    first = engine.step().revision
    assert first == 1, "0 stands for none"
    engine.admit(1, range(24))
    revision = engine.step().revision
    assert revision == first + 3
    engine.do(ops.free([1]))
    assert engine.step(ops.admit(2, range(50, 82))).revision == revision + 3
    assert engine.world.observed().counters.num_evictions == 3


# OK, LATER or NEVER


def test_the_watermark_leaves_blocks_free_once_something_is_held() -> None:
    engine = World(num_device=10, watermark=0.2).engine()
    assert status_of(only(engine.admit(1, range(8 * 5)))) == OK
    (later,) = only(engine.step(ops.admit(2, range(100, 132)))).failures
    assert later.status == LATER
    assert later.shortage.reason == cpb.SHORTAGE_REASON_HEADROOM
    assert (later.shortage.num_blocks_needed, later.shortage.num_blocks_available) == (4, 3)
    assert later.shortage.retry_delay.ToMilliseconds() == 50
    assert status_of(only(engine.admit(2, range(100, 124)))) == OK


def test_nothing_is_reserved_for_what_a_session_says_it_will_need() -> None:
    world = World(num_device=10)
    one, other = world.engine(), world.engine()
    one.admit(1, range(8), max_total_tokens=80)
    assert status_of(only(other.admit(1, range(200, 200 + 72)))) == OK
    assert status_of(only(one.step(ops.admit(2, [1], max_total_tokens=81)))) == NEVER
    (later,) = only(one.step(one.growth(1, [8], 1))).failures
    assert (later.status, later.shortage.reason) == (LATER, cpb.SHORTAGE_REASON_BLOCKS)


def test_a_shortage_says_what_is_in_the_way() -> None:
    world = World(num_device=4, num_host=1)
    one, other = world.engine(), world.engine()
    one.admit(1, range(24))
    (later,) = only(other.step(ops.admit(1, range(50, 66)))).failures
    assert (later.status, later.shortage.reason) == (LATER, cpb.SHORTAGE_REASON_BLOCKS)
    assert later.shortage.tier == DEVICE
    assert (later.shortage.num_blocks_needed, later.shortage.num_blocks_available) == (2, 1)
    assert (later.shortage.num_blocks_pending, later.shortage.queue_position) == (0, 0)
    one.step(ops.free([1]))
    (later,) = only(other.step(ops.admit(1, range(50, 66)))).failures
    assert later.shortage.num_blocks_pending == 3
    (never,) = only(other.step(ops.admit(1, range(33)))).failures
    assert (never.status, never.shortage.reason) == (NEVER, cpb.SHORTAGE_REASON_BLOCKS)
    assert (never.shortage.num_blocks_needed, never.shortage.num_blocks_available) == (5, 4)
    assert not never.shortage.HasField("retry_delay")
    one.run_all()
    one.settle()
    other.admit(1, [1])
    other.admit(2, [2] * 8)
    (never,) = only(other.step(ops.swap([1, 2], "host"))).failures
    assert (never.status, never.shortage.tier) == (NEVER, HOST)
    assert (never.shortage.num_blocks_needed, never.shortage.num_blocks_available) == (2, 1)
