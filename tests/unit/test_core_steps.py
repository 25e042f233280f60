"""Steps of one engine: what each operation does, and what it refuses."""

from __future__ import annotations

import pytest
from core_data_plane import pack
from core_model import World

from control_plane.planning.model import (
    Admit,
    Append,
    CoreConfig,
    Fork,
    Free,
    LateTokens,
    Operation,
    OperationResult,
    Status,
    SwapIn,
    SwapOut,
    Tier,
)
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    NeverFitsError,
    PoolFullError,
    SequenceBusyError,
    SequenceExistsError,
    SequenceNotFoundError,
    SequenceSwappedError,
    StepOutOfOrderError,
    TooManyPlansInFlightError,
)


def only(results: tuple[OperationResult, ...]) -> OperationResult:
    assert len(results) == 1
    return results[0]


def test_a_fork_that_was_not_told_its_tokens_shares_what_its_parent_publishes() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(10))
    engine.step(Append(1, b"", num_slots=6))
    engine.step(Fork(1, 2))
    engine.run_all()
    told = [late for late in engine.late_tokens() if late.sequence_id == 1]
    engine.submit(engine.receipts, told)
    assert world.core.describe_pool("pool").counters.num_publications == 2
    world.core.check_integrity()
    assert engine.table(2) == engine.table(1)
    engine.receipts.clear()
    engine.append(2, num_slots=1)
    assert engine.table(2)[:2] == engine.table(1)[:2]
    world.core.check_integrity()


def test_an_empty_step_has_no_plan_but_uses_its_number() -> None:
    engine = World().engine()
    assert engine.step().plan is None
    assert engine.step().number == 2


@pytest.mark.parametrize(
    ("operation", "error", "field"),
    [
        (Admit(0, pack([1])), InvalidRequestError, "operations[0].admit.sequence_id"),
        (Admit(2**63, pack([1])), InvalidRequestError, "operations[0].admit.sequence_id"),
        (Admit(2, b""), InvalidRequestError, "operations[0].admit.token_ids"),
        (Admit(2, b"abc"), InvalidRequestError, "operations[0].admit.token_ids"),
        (Admit(2, pack([-1])), InvalidRequestError, "operations[0].admit.token_ids"),
        (Admit(2, pack([1]), -1), InvalidRequestError, "operations[0].admit.num_compute_tokens"),
        (Admit(1, pack([1])), SequenceExistsError, "operations[0].admit.sequence_id"),
        (Append(9), SequenceNotFoundError, "operations[0].append.sequence_id"),
        (Append(1, b"", -1), InvalidRequestError, "operations[0].append.num_slots"),
        (Append(1, b"", 2**50), InvalidRequestError, "operations[0].append.num_slots"),
        (Fork(9, 2), SequenceNotFoundError, "operations[0].fork.parent_sequence_id"),
        (Fork(1, 1), SequenceExistsError, "operations[0].fork.sequence_id"),
        (Free(9), SequenceNotFoundError, "operations[0].free.sequence_id"),
        (SwapOut(()), InvalidRequestError, "operations[0].swap_out.sequence_ids"),
        (SwapOut((1, 1)), InvalidRequestError, "operations[0].swap_out.sequence_ids"),
        (SwapOut((9,)), SequenceNotFoundError, "operations[0].swap_out.sequence_ids[0]"),
        (SwapIn((1,)), SequenceSwappedError, "operations[0].swap_in.sequence_ids[0]"),
    ],
)
def test_a_wrong_operation_fails_alone_and_names_its_field(
    operation: Operation, error: type[KvplaneError], field: str
) -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(4))
    result = only(engine.step(operation).results)
    assert result.status is Status.FAILED
    assert type(result.error) is error
    assert result.error.field == field
    world.core.check_integrity()


def test_a_sequence_that_computes_in_a_step_is_busy_for_the_rest_of_it() -> None:
    engine = World().engine()
    outcome = engine.step(
        Admit(1, pack(range(4))), Fork(1, 2), Free(1), SwapOut((1,)), Append(1, pack([5]), 1)
    )
    errors = [type(result.error) for result in outcome.results[1:]]
    assert errors == [SequenceBusyError] * 3 + [InvalidRequestError]


def test_a_prompt_can_be_computed_in_chunks() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(20), num_compute_tokens=8)
    assert engine.state(1).num_written_tokens == 8
    assert engine.state(1).num_blocks == 3
    engine.send(Append(1, b"", 12))
    engine.settle()
    assert engine.state(1).num_written_tokens == 20
    assert world.core.lookup_prefix(engine.id, engine.tenant, pack(range(20))).num_cached_tokens


def test_slots_reserved_without_tokens_are_published_when_the_tokens_come() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(7))
    engine.step(Append(1, b"", 1))
    engine.run_all()
    engine.submit(engine.receipts)
    prompt = pack([*range(7), 1, 9])
    lookup = world.core.lookup_prefix
    assert lookup(engine.id, engine.tenant, prompt).num_cached_tokens == 0
    engine.submit([], engine.late_tokens())
    assert lookup(engine.id, engine.tenant, prompt).num_cached_tokens == 8
    engine.submit([], [LateTokens(1, 7, pack([1]))])  # again: nothing new
    with pytest.raises(InvalidRequestError, match=r"late_tokens\[0\]"):
        engine.submit([], [LateTokens(1, 7, pack([2]))])
    with pytest.raises(InvalidRequestError, match=r"late_tokens\[0\].first_position"):
        engine.submit([], [LateTokens(1, 9, pack([2]))])


def test_what_a_freed_sequence_wrote_is_published_when_its_receipts_come() -> None:
    world = World(num_device=6)
    engine, other = world.engine(), world.engine()
    prompt = pack([*range(32), 99])
    engine.step(Admit(1, prompt))
    engine.step(Free(1))
    # The session allocates first what holds no prefix: of the five blocks it freed, the last.
    assert only(engine.step(Admit(2, pack([7] * 9))).results).status is Status.OK
    cached = world.core.lookup_prefix(other.id, other.tenant, prompt).num_cached_tokens
    assert cached == 0, "nothing is written yet"
    engine.run_all()
    engine.settle()
    assert world.core.lookup_prefix(other.id, other.tenant, prompt).num_cached_tokens == 32
    world.core.check_integrity()
    assert world.usage() == {"free": 0, "cached": 4, "held": 2, "limbo": 0, "reserved": 0}
    world.pump()
    engine.send(Free(2))
    engine.settle()
    assert other.cached(1, [*range(32), 99]) == 32


def test_a_freed_sequences_blocks_that_were_reused_are_not_published() -> None:
    world = World(num_device=5)
    engine = world.engine()
    prompt = pack([*range(32), 99])
    engine.step(Admit(1, prompt))
    engine.step(Free(1))
    assert only(engine.step(Admit(2, pack([7] * 24))).results).status is Status.OK
    engine.run_all()
    engine.settle()
    lookup = world.core.lookup_prefix(engine.id, engine.tenant, prompt)
    assert lookup.num_cached_tokens == 16, "tails are reused before heads"
    world.core.check_integrity()


def test_a_freed_sequence_whose_plans_are_aborted_publishes_nothing() -> None:
    world = World()
    engine = world.engine()
    engine.step(Admit(1, pack(range(17))))
    engine.step(Free(1))
    engine.abort(1)
    engine.queue.clear()
    engine.step()
    engine.run_all()
    engine.settle()
    lookup = world.core.lookup_prefix(engine.id, engine.tenant, pack(range(17)))
    assert lookup.num_cached_tokens == 0
    assert world.usage()["limbo"] == 0
    world.core.check_integrity()


def test_tokens_that_complete_a_written_block_are_published_when_the_sequence_is_freed() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(7))
    engine.step(Append(1, b"", 1))
    engine.run_all()
    engine.submit(engine.receipts)
    engine.receipts.clear()
    engine.step(Append(1, pack([7])), Free(1))
    lookup = world.core.lookup_prefix(engine.id, engine.tenant, pack(range(9)))
    assert lookup.num_cached_tokens == 8


def test_forks_share_blocks_until_one_writes() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(12))
    engine.send(Fork(1, 2), Fork(1, 3))
    engine.settle()
    assert engine.table(1) == engine.table(2) == engine.table(3)
    engine.send(Append(1, pack([50]), 1), Append(2, pack([51]), 1), Append(3, pack([52]), 1))
    engine.settle()
    tails = {engine.table(i)[1] for i in (1, 2, 3)}
    assert len(tails) == 3
    assert world.core.describe_pool("pool").counters.num_copies_on_write >= 2
    engine.append(2, 60)
    engine.check()


def test_swapped_forks_stay_shared_both_ways() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(12))
    engine.send(Fork(1, 2))
    engine.send(SwapOut((1, 2)))
    assert engine.state(1).tier is Tier.HOST
    assert world.usage()["held"] == 2, "sources are held until the receipt"
    engine.settle()
    assert world.usage()["held"] == 0
    assert engine.table(1) == engine.table(2)
    assert isinstance(
        only(engine.step(Append(1, pack([1]), 1)).results).error, SequenceSwappedError
    )
    engine.send(SwapIn((2, 1)), Append(1, pack([7]), 1))
    engine.settle()
    assert engine.table(1)[0] == engine.table(2)[0]
    engine.append(2, 8)
    engine.check()


def test_a_cached_prompt_of_the_pools_size_is_admitted_without_room_for_a_copy() -> None:
    engine = World(num_device=4).engine()
    engine.admit(1, range(32))
    engine.send(Free(1))
    engine.settle()
    assert engine.cached(2, range(32)) == 24, "the last block is computed anew"


def test_tails_of_prefixes_are_evicted_before_their_heads() -> None:
    world = World(num_device=6)
    engine = world.engine()
    engine.admit(1, range(32))
    engine.send(Free(1))
    engine.settle()
    engine.admit(2, range(50, 74))
    assert world.core.describe_pool("pool").counters.num_evictions == 1
    assert (
        world.core.lookup_prefix(engine.id, engine.tenant, pack(range(33))).num_cached_tokens == 24
    )


def test_the_watermark_leaves_blocks_free_once_something_is_held() -> None:
    engine = World(num_device=10, config=CoreConfig(watermark=0.2)).engine()
    assert engine.admit(1, range(8 * 5)).results[0].status is Status.OK
    later = only(engine.step(Admit(2, pack(range(100, 132)))).results)
    assert later.status is Status.LATER
    assert later.shortage is not None
    assert (later.shortage.num_blocks_needed, later.shortage.num_blocks_available) == (4, 3)
    assert engine.admit(2, range(100, 124)).results[0].status is Status.OK


def test_each_session_is_guaranteed_its_longest_sequence() -> None:
    world = World(num_device=10)
    one, other = world.engine(), world.engine()
    one.admit(1, range(8), max_total_tokens=48)
    assert world.usage()["reserved"] == 5
    assert only(other.step(Admit(1, pack(range(200, 240)))).results).status is Status.LATER
    assert other.admit(1, range(200, 232)).results[0].status is Status.OK
    assert other.append(1, 99).results[0].status is Status.LATER
    for token in range(8, 48):
        assert one.append(1, token).results[0].status is Status.OK


def test_a_unary_step_that_is_not_done_raises_and_keeps_its_number() -> None:
    world = World(num_device=4)
    engine = world.engine()

    def unary(operation: Operation) -> None:
        world.core.step(
            engine.id, engine.tenant, engine.number + 1, [operation], content=b"", atomic=True
        )

    with pytest.raises(NeverFitsError):
        unary(Admit(1, pack(range(80))))
    engine.admit(1, range(24))
    with pytest.raises(PoolFullError):
        unary(Admit(2, pack(range(50, 74))))
    with pytest.raises(SequenceNotFoundError):
        unary(Free(9))
    assert engine.step().number == 2


def test_plans_in_flight_and_numbers_are_bounded() -> None:
    world = World(config=CoreConfig(max_plans_in_flight=2, watermark=0.0))
    engine = world.engine()
    engine.step(Admit(1, pack([1])))
    engine.step(Append(1, b"", 1))
    with pytest.raises(TooManyPlansInFlightError):
        engine.step(Append(1, b"", 1))
    engine.step(Append(1, pack([5]), 0))
    engine.run_all()
    engine.settle()
    engine.step(Append(1, b"", 1))
    for number in (1, 9):
        with pytest.raises(StepOutOfOrderError):
            world.core.step(engine.id, engine.tenant, number, [], content=b"")


def test_an_abort_undoes_swaps_and_copies_and_keeps_cached_hits() -> None:
    world = World()
    engine = world.engine()
    engine.admit(1, range(20))
    engine.admit(2, range(100, 112))
    before = {i: engine.table(i) for i in (1, 2)}
    engine.step(Fork(2, 3), SwapOut((1,)), Append(2, pack([7]), 1), Admit(4, pack(range(17))))
    engine.abort(engine.number)
    assert {i: engine.table(i) for i in (1, 2)} == before
    assert engine.table(3) == before[2]
    assert engine.state(4).num_tokens == 16
    assert engine.state(1).tier is Tier.DEVICE
    world.core.check_integrity()
    plan = engine.send(Append(4, pack([16]), 1)).plan
    assert plan is not None
    assert world.plans[plan.digest].resync
    engine.settle()
    engine.check()
