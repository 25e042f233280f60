"""Requests in slices: they come to what they come to in one, and others are served in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from control_plane import queries
from control_plane.core import ControlPlane
from control_plane.steps import operations, plans, receipts, requests, slices
from control_plane.steps.answers import StepAnswer
from kvplane import ops
from kvplane.errors import SessionNotFoundError
from kvplane.slices import Slices, run_to_end
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_messages import receipt_of
from tests.helpers.core.core_model import LATER, Engine, World, status_of

SEVERAL = 24
SIX = range(1, 7)


def in_slices(core: ControlPlane, request: Any, between: Callable[[], None]) -> Any:
    """Return the answer of a request in slices, ``between`` which something is done."""
    answer = to_the_end(core, core.run(request, "tenant"), between)
    return written(answer) if isinstance(answer, StepAnswer) else answer


def to_the_end(core: ControlPlane, slices: Slices[Any], between: Callable[[], None]) -> Any:
    """Return what all slices come to. The core is sound after each."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value
        core.check_integrity()
        between()


def a_step(engine: Engine, *operations: cpb.Operation) -> cpb.StepRequest:
    """The next step, with the receipts of all plans that have run."""
    number, receipts = engine.number + 1, engine.receipts
    return cpb.StepRequest(
        session=engine.ref, number=number, operations=operations, receipts=receipts
    )


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Slices of a few tokens and sequences."""
    for module in (operations, requests, slices):
        patch.setattr(module, "SLICE_TOKENS", 10)
    for module in (operations, receipts):
        patch.setattr(module, "SLICE_BLOCKS", 3)
    patch.setattr(receipts, "SLICE_RECEIPTS", 2)
    patch.setattr(requests, "SLICE_SEQUENCES", 3)
    for module in (requests, plans):
        patch.setattr(module, "SLICE_ENTRIES", 3)
    patch.setattr("control_plane.sessions.sessions._SLICE_BLOCKS", 20)
    patch.setattr("control_plane.core._CHECKED_AT_A_TIME", 3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def growth(rng: random.Random, positions: dict[int, int]) -> cpb.Operation:
    """An append of many tokens to sequences, of which some are unknown, named twice, or end at
    another position.
    """
    ids = rng.choices([*positions, 99], k=rng.randint(1, 12))
    numbers = [rng.choice([0, 1, 3, 9, 25]) for _ in ids]
    firsts = [positions.get(i, 0) + (rng.random() < 0.1) for i in ids]
    tokens = [rng.randrange(-1 if rng.random() < 0.05 else 0, 50) for _ in range(sum(numbers))]
    append = cpb.Append(
        sequence_ids=columns.pack(INT64, ids),
        first_positions=columns.pack(INT32, firsts),
        num_slots=columns.pack(INT32, numbers),
        num_tokens=columns.pack(INT32, numbers),
        token_ids=columns.pack(INT32, tokens),
    )
    if rng.random() < 0.1:
        append.num_tokens = append.num_tokens[: rng.randrange(len(append.num_tokens))]
    if rng.random() < 0.1:
        append.token_ids += b"\0\0\0\0"
    if rng.random() < 0.3:
        append.num_lookahead_slots = columns.pack(INT32, [rng.randrange(3) for _ in ids])
    return cpb.Operation(append=append)


def written(answer: StepAnswer) -> cpb.StepResponse:
    """What was encoded, which is to the byte what a message would have written."""
    response = cpb.StepResponse.FromString(answer.step)
    assert response.SerializeToString() == answer.step
    if answer.operations:
        assert list(answer.results) == list(response.results)
        assert answer.has_plan == response.HasField("plan")
    return response


def walked(seed: int) -> tuple[list[Any], int]:
    """What a walk's requests are answered, and how often something else could run."""
    rng, world = random.Random(seed), World(num_device=40, num_host=24)
    engine, answers, num_between = world.engine(), list[Any](), 0

    def between() -> None:
        nonlocal num_between
        num_between += 1

    def send(request: Any) -> None:
        request.session.CopyFrom(engine.ref)
        request.number = len(answers) + 1
        session = engine.session
        if rng.random() < 0.5:
            ran = [*session.plans][: rng.randint(0, 4)]
            if isinstance(request, cpb.AbortPlansRequest):
                ran = [number for number in ran if number < request.plan_number]
            request.receipts.extend(receipt_of(session, number) for number in ran)
        done = in_slices(world.core, request, between)
        again = (
            world.core.step(request, "tenant")
            if isinstance(request, cpb.StepRequest)
            else world.core.abort_plans(request, "tenant")
        )
        assert again == done, "the same number, the same answer"
        done = type(done).FromString(done.SerializeToString())
        if done.HasField("plan"):
            assert session.plans[request.number].digest == signing.digest(done.plan.payload)
            done.plan.ClearField("signature")  # with the pool's random key
        answers.append(done)

    send(cpb.StepRequest(operations=[ops.admit(i, range(4 * i)) for i in range(1, 6)]))
    for _ in range(SEVERAL):
        session = engine.session
        states = queries.states(session)
        ids = columns.read(INT64, states.sequence_ids, "ids")
        ends = columns.read(INT32, states.num_scheduled_tokens, "ends")
        if len(session.plans) < 4:
            positions = dict(zip(ids, ends, strict=True))
            operations = [growth(rng, positions) for _ in range(rng.randint(1, 3))]
            some = rng.sample(ids, rng.randint(0, len(ids)))
            if some and rng.random() < 0.5:
                tier = rng.choice(("host", "device"))
                operations.insert(rng.randrange(len(operations)), ops.swap(some, tier))
            if rng.random() < 0.5:
                named = rng.choices([*ids, 99], k=rng.randint(1, 5))
                ends_some = rng.random() < 0.5
                operations += [ops.free(named) if ends_some else ops.truncate(named, 3)]
                if not ends_some and rng.random() < 0.2:
                    operations[-1].truncate.num_tokens += bytes(4)
                operations += [ops.admit(100 + len(answers), range(rng.randint(1, 20)))]
            send(cpb.StepRequest(operations=operations))
        if session.plans and rng.random() < 0.3:
            send(cpb.AbortPlansRequest(plan_number=max(session.plans)))
        if len(session.plans) == 4 or rng.random() < 0.1:
            send(cpb.AbortPlansRequest(whole_tables=True))
    world.core.check_integrity()
    return answers, num_between


@pytest.mark.parametrize("seed", range(6))
def test_a_request_in_slices_is_answered_as_in_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, num_between = walked(seed)
    assert num_between == 0
    make_small(monkeypatch)
    parts, num_between = walked(seed)
    assert parts == whole
    assert num_between > SEVERAL


@pytest.mark.usefixtures("small")
def test_others_step_between_the_slices() -> None:
    world = World(num_device=64)
    engine, other = world.engine(), world.engine()
    other.admit(1, range(3))
    before = other.number

    def between() -> None:
        other.send(other.growth(1, [other.number], 1))

    admits = [ops.admit(i, range(20 * i, 20 * i + 20)) for i in range(1, 7)]
    response = in_slices(world.core, a_step(engine, *admits), between)
    assert not any(result.failures for result in response.results)
    assert other.number - before == 6, "after each operation"
    request = cpb.AbortPlansRequest(whole_tables=True, session=engine.ref, number=2)
    in_slices(world.core, request, between)
    assert other.number - before == 6 + 2 + 5, "around the states, between sequences that are cut"
    other.settle()
    world.core.check_integrity()


@pytest.mark.usefixtures("small")
def test_nobody_is_granted_blocks_between_the_slices() -> None:
    world = World(num_device=8)
    engine, other = world.engine(), world.engine()
    other.admit(1, range(40))
    admits = [ops.admit(i, range(20 * i, 20 * i + 16)) for i in (2, 3)]
    engine.step(ops.admit(1, range(500, 540), wait=True))
    assert engine.session.queued is not None

    def between() -> None:
        if other.session.native.has_sequence(other.session.handle, 1):
            other.do(ops.free([1]))
        assert engine.id not in {i for i, _ in world.core.take_news()}

    response = in_slices(world.core, a_step(engine, *admits), between)
    other.settle()
    assert [status_of(result) for result in response.results] == [LATER, LATER]
    assert response.news.granted_sequence_ids or world.core.take_news()


@pytest.mark.usefixtures("small")
def test_news_that_an_abort_is_about_to_void_hold_as_of_the_request_before_it() -> None:
    world, told = World(num_device=16, num_host=0), list[int]()
    engine, other = world.engine(), world.engine()
    other.admit(1, range(40))
    engine.step(*(ops.admit(i, range(20 * i, 20 * i + 16)) for i in range(2, 6)))
    engine.step(ops.admit(1, range(500, 540), wait=True))
    other.send(ops.free([1]))
    other.settle()
    request = cpb.AbortPlansRequest(session=engine.ref, number=engine.number + 1)

    def between() -> None:
        for _, news in world.core.take_news():
            assert news.granted_sequence_ids
            told.append(news.as_of_number)

    in_slices(world.core, request, between)
    assert told == [engine.number]


@pytest.mark.usefixtures("small")
def test_a_busy_session_is_cut_at_the_end_of_its_request() -> None:
    world = World(num_device=8, num_host=0)
    engine, other = world.engine(), world.engine()
    engine.admit(1, range(40))
    other.step(ops.admit(5, range(1000, 1030), wait=True))
    session = engine.session
    admits = [ops.admit(i, range(20 * i, 20 * i + 16)) for i in (2, 3)]
    left = world.core.run(a_step(engine, *admits), "tenant")
    next(left)
    world.pass_time(40, engine, other)
    assert session.native.has_sequence(session.handle, 1)
    run_to_end(left)
    assert not session.native.has_sequence(session.handle, 1), "before its next request"
    world.core.check_integrity()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("is_fenced_first", [True, False])
def test_a_session_that_ends_is_released_between_requests(is_fenced_first: bool) -> None:
    world = World(num_device=64, lease_s=10.0)
    engine, other = world.engine(), world.engine()
    engine.admit(1, range(20))
    engine.do(*(ops.fork(1, i) for i in range(2, 9)))
    world.clock.now += 8.0
    other.admit(1, range(3))
    world.after(4.0)
    if is_fenced_first:
        world.pump()
    num_slices = 0
    world.core.take_notified()
    while world.core.has_work():
        assert world.usage()["held"] + world.usage()["retired"] > 1
        other.send(other.growth(1, [num_slices], 1))
        world.core.work()
        world.core.check_integrity()
        num_slices += 1
    assert num_slices == 3, "and two sequences at once"
    world.pump()
    assert world.usage()["retired"] == 0
    assert world.usage()["cached"] == 2


@pytest.mark.usefixtures("small")
def test_what_a_plan_published_and_its_tables_are_taken_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (slices, plans):
        monkeypatch.setattr(module, "SLICE_BYTES", 100)
    world = World(num_device=64)
    engine, other = world.engine(), world.engine()
    engine.send(*(ops.admit(i, range(20 * i, 20 * i + 20)) for i in SIX))
    session = engine.session
    found: list[int] = []

    def between() -> None:
        found.append(sum(other.lookup(range(20 * i, 20 * i + 20)) > 0 for i in SIX))

    in_slices(world.core, a_step(engine), between)
    assert found == [1, 2, 3, 4, 5], "after each sequence"
    found.clear()
    request = cpb.AbortPlansRequest(whole_tables=True, session=engine.ref, number=engine.number + 2)
    response = in_slices(world.core, request, between)
    num_chunks = -(-len(response.plan.payload) // 100)
    assert len(found) == 2 + 1 + 5 + num_chunks
    digest = signing.digest(response.plan.payload)
    assert session.plans[engine.number + 2].digest == digest


SIX_MORE = [ops.admit(6 + i, range(20 * i + 200, 20 * i + 220)) for i in SIX]
OUT = ops.swap([*SIX], "host")


def an_abort(engine: Engine, *operations: cpb.Operation) -> cpb.AbortPlansRequest:
    """An abort of a step of these operations."""
    engine.step(*operations)
    number = engine.number
    return cpb.AbortPlansRequest(session=engine.ref, number=number + 1, plan_number=number)


def receipts_of(engine: Engine, *operations: cpb.Operation) -> cpb.StepRequest:
    engine.step(*operations)
    engine.run_all()
    return a_step(engine)


def receipts_of_what_is_freed(engine: Engine) -> cpb.StepRequest:
    engine.step(*SIX_MORE)
    engine.run_all()
    engine.step(ops.free([9]))
    return a_step(engine)


def a_step_after_an_abort(engine: Engine) -> cpb.StepRequest:
    engine.step(OUT)
    engine.abort(engine.number)
    return a_step(engine, OUT)


ENDED: dict[str, tuple[Callable[[Engine], Any], int]] = {
    "admissions": (lambda engine: a_step(engine, *SIX_MORE), 5),
    "an abort of admissions": (lambda engine: an_abort(engine, *SIX_MORE), 6),
    "receipts": (receipts_of_what_is_freed, 4),
    "free": (lambda engine: a_step(engine, ops.free([*SIX, 99])), 1),
    "swap": (lambda engine: a_step(engine, OUT), 12),
    "an abort of a swap": (lambda engine: an_abort(engine, OUT), 12),
    "a receipt of a swap": (lambda engine: receipts_of(engine, OUT), 12),
    "a step after an abort": (a_step_after_an_abort, 12),
}
"""Requests of a session of six sequences, and more slices than this that each takes."""


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ENDED)
def test_a_session_may_end_between_the_slices(kind: str) -> None:
    request, more_than = ENDED[kind]
    num_slices = 1
    while ends_within(request, num_slices):
        num_slices += 1
    assert num_slices > more_than


def ends_within(request: Callable[[Engine], Any], num_slices: int) -> bool:
    """A session of six sequences ends after so many slices of a request, and nothing of it is
    left. Whether the request has as many.
    """
    world = World(num_device=64, num_host=64)
    engine, other = world.engine(), world.engine()
    other.admit(1, range(3))
    engine.do(*(ops.admit(i, range(20 * i, 20 * i + 20)) for i in SIX))
    left = world.core.run(request(engine), "tenant")
    for _ in range(num_slices):
        try:
            next(left)
        except StopIteration:
            return False
        world.core.check_integrity()
        other.send(other.growth(1, [other.number], 1))
    world.core.close_session(engine.ref, "tenant")
    world.core.check_integrity()
    with pytest.raises(SessionNotFoundError):
        next(left)
    other.do(ops.free([1]))
    world.work()
    world.pump()
    for tier in (tpb.TIER_DEVICE, tpb.TIER_HOST):
        usage = world.usage(tier)
        assert usage["held"] == usage["retired"] == 0
    world.engine().cached(1, range(500, 520))  # the queue goes on
    return True


@pytest.mark.usefixtures("small")
def test_operations_are_checked_a_few_at_a_time() -> None:
    world = World(num_device=16)
    engine, other = world.engine(), world.engine()
    engine.admit(1, range(20))
    other.admit(1, range(3))
    core = world.core
    operations = [
        each for i in range(4) for each in (ops.admit(2 + i, range(60 * i)), ops.free([i]))
    ]

    def check(*some: cpb.Operation) -> Slices[cpb.StepResponse]:
        request = cpb.StepRequest(session=engine.ref, operations=some, validate_only=True)
        return core.validate(request, "tenant")

    expected = [run_to_end(check(each)).results[0] for each in operations]
    between = list[None]()

    def step_other() -> None:
        between.append(None)
        other.send(other.growth(1, [other.number], 1))

    results = to_the_end(core, check(*operations), step_other).results
    assert len(between) == 2
    assert [*map(status_of, results)] == [*map(status_of, expected)]
    assert len({*map(status_of, results)}) > 1
    assert [r.HasField("admit") for r in results] == [r.HasField("admit") for r in expected]

    left = check(*operations)
    next(left)
    core.close_session(engine.ref, "tenant")
    with pytest.raises(SessionNotFoundError):
        next(left)
    other.settle()
    core.check_integrity()
