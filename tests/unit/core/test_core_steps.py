"""Steps of one engine: what each operation does, and what it refuses."""

from __future__ import annotations

import pytest

from control_plane.config import CoreConfig
from kvplane import ops
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    PositionMismatchError,
    QuotaExceededError,
    SequenceBusyError,
    SequenceExistsError,
    SequenceNotFoundError,
    SequenceSwappedError,
    TooManyPlansInFlightError,
)
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_messages import HOST, pack
from tests.helpers.core.core_model import (
    FAILED,
    OK,
    World,
    error_in,
    status_of,
)


def only(result: cpb.StepResponse) -> cpb.OperationResult:
    (operation,) = result.results
    return operation


def statuses(result: cpb.StepResponse) -> list[int]:
    return [status_of(operation) for operation in result.results]


def test_an_empty_step_has_no_plan_but_uses_its_number() -> None:
    engine = World().engine()
    assert not engine.step().HasField("plan")
    engine.step()
    assert engine.number == 2


OVERFLOW = ops.append(1, pack([1, 2]), 1, first_positions=4)
OVERFLOW.append.num_tokens = columns.pack(INT32, [1])
CUT_OFF = ops.append(1, b"", 1, first_positions=4)
CUT_OFF.append.sequence_ids += b"x"
UNEVEN = ops.append([1, 1], (), 0, first_positions=[4])
FEW_SLOTS = ops.append([1, 1], (), [0], first_positions=4)
FEW_COUNTS = ops.append([1, 1], (), 0, first_positions=4, num_tokens=[0])


@pytest.mark.parametrize(
    ("operation", "error", "field"),
    [
        (ops.admit(0, [1]), InvalidRequestError, "admit.sequence_id"),
        (ops.admit(-1, [1]), InvalidRequestError, "admit.sequence_id"),
        (ops.admit(1, [1]), SequenceExistsError, "admit.sequence_id"),
        (ops.admit(2, b""), InvalidRequestError, "admit.token_ids"),
        (ops.admit(2, b"abc"), InvalidRequestError, "admit.token_ids"),
        (ops.admit(2, [-1]), InvalidRequestError, "admit.token_ids[0]"),
        (
            ops.admit(2, [1], num_compute_tokens=-1),
            InvalidRequestError,
            "admit.num_compute_tokens",
        ),
        (
            ops.admit(2, [1], max_total_tokens=-(2**31)),
            InvalidRequestError,
            "admit.max_total_tokens",
        ),
        (ops.append(9, first_positions=0), SequenceNotFoundError, "append.sequence_ids[0]"),
        (ops.append(3, [1], first_positions=4), SequenceSwappedError, "append.sequence_ids[0]"),
        (
            ops.append(1, [9], 1, first_positions=3),
            PositionMismatchError,
            "append.first_positions[0]",
        ),
        (
            ops.append(1, [9], 1, first_positions=5),
            PositionMismatchError,
            "append.first_positions[0]",
        ),
        (
            ops.append(1, [9], 0, first_positions=-1),
            PositionMismatchError,
            "append.first_positions[0]",
        ),
        (ops.append(1, b"", -1, first_positions=4), InvalidRequestError, "append.num_slots[0]"),
        (ops.append(1, [-1], 1, first_positions=4), InvalidRequestError, "append.token_ids[0]"),
        (
            ops.append(1, (), 1, first_positions=4, num_tokens=-1),
            InvalidRequestError,
            "append.num_tokens[0]",
        ),
        (
            ops.append(1, b"abc", 1, first_positions=4, num_tokens=1),
            InvalidRequestError,
            "append.token_ids",
        ),
        (OVERFLOW, InvalidRequestError, "append.token_ids"),
        (CUT_OFF, InvalidRequestError, "append.sequence_ids"),
        (UNEVEN, InvalidRequestError, "append.first_positions"),
        (FEW_SLOTS, InvalidRequestError, "append.num_slots"),
        (FEW_COUNTS, InvalidRequestError, "append.num_tokens"),
        (ops.fork(9, 2), SequenceNotFoundError, "fork.parent_sequence_ids[0]"),
        (ops.fork(1, 1), SequenceExistsError, "fork.sequence_ids[0]"),
        (ops.fork(1, 0), InvalidRequestError, "fork.sequence_ids[0]"),
        (ops.fork([1, 1], [2]), InvalidRequestError, "fork.parent_sequence_ids"),
        (ops.free([9]), SequenceNotFoundError, "free.sequence_ids[0]"),
        (ops.free(b"1234"), InvalidRequestError, "free.sequence_ids"),
        (ops.swap([], "host"), InvalidRequestError, "swap.sequence_ids"),
        (ops.swap([1, 1], "host"), InvalidRequestError, "swap.sequence_ids[1]"),
        (ops.swap([1, 9], "host"), SequenceNotFoundError, "swap.sequence_ids[1]"),
        (ops.swap([1, 3], "host"), SequenceSwappedError, "swap.sequence_ids[1]"),
        (ops.swap([1], "device"), SequenceSwappedError, "swap.sequence_ids[0]"),
        (cpb.Operation(), InvalidRequestError, ""),
    ],
)
def test_a_wrong_operation_fails_alone_and_names_its_field(
    operation: cpb.Operation, error: type[KvplaneError], field: str
) -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(4))
    engine.admit(3, range(4))
    engine.send(ops.swap([3], "host"))
    engine.settle()
    before = engine.everything()
    result = only(engine.step(operation))
    (failure,) = result.failures
    assert (failure.item, failure.status) == (0, FAILED)
    assert type(error_in(result)) is error
    assert failure.error.field == f"operations[0].{field}".rstrip(".")
    assert engine.everything() == before
    world.core.check_integrity()


def test_a_sequence_that_computes_in_a_step_is_busy_for_the_rest_of_it() -> None:
    engine = World().engine()
    result = engine.step(
        ops.admit(1, range(4)),
        ops.fork(1, 2),
        ops.free([1]),
        ops.swap([1], "host"),
        ops.append(1, [5], 1, first_positions=4),
    )
    errors = [type(error_in(operation)) for operation in result.results[1:]]
    assert errors == [SequenceBusyError] * 3 + [InvalidRequestError]


def test_a_step_has_a_bounded_number_of_items() -> None:
    world = World(config=CoreConfig(watermark=0.0, max_operations=4))
    engine = world.engine()
    engine.admit(1, range(4))
    for operations in (
        [ops.free([7, 8, 9]), ops.free([7]), ops.admit(2, [1])],
        [ops.swap(range(5), "host")],
        [ops.free([])] * 5,
        [cpb.Operation()] * 5,
    ):
        before = engine.everything()
        with pytest.raises(InvalidRequestError, match="operations: must have at most 4 items"):
            engine.step(*operations)
        assert engine.everything() == before
    with pytest.raises(InvalidRequestError, match=r"deferred_tokens\.sequence_ids"):
        engine.submit(deferred=ops.deferred_tokens([1] * 5, [1] * 5, [3] * 5, [1] * 5, [3] * 5))
    with pytest.raises(InvalidRequestError, match="receipts: must be at most 4"):
        engine.submit([tpb.SignedPayload()] * 5)
    assert statuses(engine.step(ops.free([7, 8, 9]), ops.admit(2, [1])))[1] == OK


def test_a_session_has_a_bounded_number_of_sequences() -> None:
    engine = World(config=CoreConfig(watermark=0.0, max_sequences=1)).engine()
    engine.admit(1, [1])
    assert type(error_in(only(engine.step(ops.admit(2, [1]))))) is QuotaExceededError


def test_forks_do_not_take_a_sessions_tables_beyond_their_bound() -> None:
    config = CoreConfig(watermark=0.0, max_table_entries=7)
    engine = World(config=config).engine()
    engine.admit(1, list(range(16)))  # two blocks
    forked = only(engine.step(ops.fork(1, [2, 3, 4])))
    assert [failure.item for failure in forked.failures] == [2]
    assert type(error_in(forked)) is QuotaExceededError
    assert columns.read(INT32, forked.num_table_blocks, "").tolist() == [2, 2, 0]
    freed, again = engine.step(ops.free([2]), ops.fork(1, [4, 5])).results
    assert not freed.failures
    assert [failure.item for failure in again.failures] == [1]
    engine.run_all()
    engine.check()


def test_a_prompt_can_be_computed_in_chunks() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(20), num_compute_tokens=8)
    assert engine.state(1).num_written_tokens == 8
    assert engine.state(1).num_blocks == 1, "blocks are taken as chunks come"
    engine.send(engine.growth(1, num_slots=12))
    engine.settle()
    assert engine.state(1).num_written_tokens == 20
    assert engine.lookup(range(20)) == 16


def test_what_a_freed_sequence_wrote_is_published_when_its_receipts_come() -> None:
    world = World(num_device=6)
    engine, other = world.engine(), world.engine()
    prompt = [*range(32), 99]
    engine.step(ops.admit(1, prompt))
    engine.step(ops.free([1]))
    # The session allocates first what holds no prefix: of the five blocks it freed, the last.
    assert status_of(only(engine.step(ops.admit(2, [7] * 9)))) == OK
    assert other.lookup(prompt) == 0, "nothing is written yet"
    engine.run_all()
    engine.settle()
    assert other.lookup(prompt) == 32
    world.core.check_integrity()
    assert world.usage() == {"free": 0, "cached": 4, "held": 2, "retired": 0}
    world.pump()
    engine.send(ops.free([2]))
    engine.settle()
    assert other.cached(1, [*range(32), 99]) == 32


def test_a_freed_sequences_blocks_that_were_reused_are_not_published() -> None:
    world = World(num_device=5)
    engine = world.engine()
    prompt = [*range(32), 99]
    engine.step(ops.admit(1, prompt))
    engine.step(ops.free([1]))
    assert status_of(only(engine.step(ops.admit(2, [7] * 24)))) == OK
    engine.run_all()
    engine.settle()
    assert engine.lookup(prompt) == 16, "tails are reused before heads"
    world.core.check_integrity()


def test_tokens_that_complete_a_written_block_are_published_when_the_sequence_is_freed() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(7))
    engine.step(engine.growth(1, num_slots=1))
    engine.run_all()
    engine.submit(engine.receipts)
    engine.receipts.clear()
    engine.step(engine.growth(1, [7]), ops.free([1]))
    assert engine.lookup(range(9)) == 8


def test_forks_share_blocks_until_one_writes() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(12))
    engine.send(ops.fork(1, [2, 3]))
    engine.settle()
    assert engine.table(1) == engine.table(2) == engine.table(3)
    engine.send(ops.append([1, 2, 3], [50, 51, 52], 1, first_positions=12, num_tokens=1))
    engine.settle()
    tails = {engine.table(i)[1] for i in (1, 2, 3)}
    assert len(tails) == 3
    assert world.observed().counters.num_copies_on_write >= 2
    engine.append(2, 60)
    engine.check()


def test_swapped_forks_stay_shared_both_ways() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(12))
    engine.send(ops.fork(1, 2))
    engine.send(ops.swap([1, 2], "host"))
    assert engine.state(1).tier == HOST
    assert world.usage()["held"] == 2, "sources are held until the receipt"
    engine.settle()
    assert world.usage()["held"] == 0
    assert engine.table(1) == engine.table(2)
    assert type(error_in(only(engine.step(engine.growth(1, [1], 1))))) is SequenceSwappedError
    engine.send(ops.swap([2, 1], "device"), engine.growth(1, [7], 1))
    engine.settle()
    assert engine.table(1)[0] == engine.table(2)[0]
    engine.append(2, 8)
    engine.check()


def test_a_cached_prompt_of_the_pools_size_is_admitted_without_room_for_a_copy() -> None:
    engine = World(num_device=4).engine()
    engine.admit(1, range(32))
    engine.send(ops.free([1]))
    engine.settle()
    assert engine.cached(2, range(32)) == 24, "the last block is computed anew"


def test_tails_of_prefixes_are_evicted_before_their_heads() -> None:
    world = World(num_device=6, num_host=0)
    engine = world.engine()
    engine.admit(1, range(32))
    engine.send(ops.free([1]))
    engine.settle()
    engine.admit(2, range(50, 74))
    assert world.observed().counters.num_evictions == 1
    assert engine.lookup(range(33)) == 24


def test_the_revision_counts_publications_and_evictions() -> None:
    world = World(num_device=4)
    engine = world.engine()
    first = engine.step().revision
    assert first == 1, "0 stands for none"
    engine.admit(1, range(24))
    revision = engine.step().revision
    assert revision == first + 3
    engine.send(ops.free([1]))
    engine.settle()
    assert engine.step(ops.admit(2, range(50, 82))).revision == revision + 3


def test_plans_in_flight_are_bounded() -> None:
    world = World(config=CoreConfig(max_plans_in_flight=2, watermark=0.0))
    engine = world.engine()
    engine.step(ops.admit(1, [1]))
    engine.step(engine.growth(1, num_slots=1))
    with pytest.raises(TooManyPlansInFlightError):
        engine.step(engine.growth(1, num_slots=1))
    engine.step(engine.growth(1, [5]))
    engine.run_all()
    engine.step(engine.growth(1, num_slots=1), receipts=engine.receipts)
    assert engine.queue
