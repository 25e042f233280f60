"""Calls of steps and sessions: what every engine's requests come to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.fuzz.pool_world import (
    MANY_BLOCKS,
    MOST,
    NUM_BLOCKS,
    REFUSALS,
    Call,
    Session,
    World,
    granted,
)


def admit(world: World, session: Session) -> None:
    data = world.data
    admitted_by = [session.number] if data.ConsumeBool() else []
    call: Callable[..., Any] = world.pool.grant if admitted_by else world.pool.admit
    most = MANY_BLOCKS + 20 if data.ConsumeIntInRange(0, 7) == 7 else 4 * NUM_BLOCKS + 4
    call(
        session.handle,
        *admitted_by,
        world.number(9),
        world.prompt() if data.ConsumeBool() else world.tokens(most),
        world.ids(data.ConsumeIntInRange(0, 2)),
        world.number(9),
        world.number(48),
        data.ConsumeBool(),
        world.number(3),
    )


def compute(world: World, session: Session) -> None:
    """A prompt is admitted and its plan has run; then others find it. Perhaps it is freed."""
    pool, sequence_id = world.pool, world.data.ConsumeIntInRange(1, 9)
    pool.admit(session.handle, sequence_id, world.prompt(), b"", -1, 0, False, 0)
    world.finish(session)
    with granted():
        pool.receipted(session.handle, pool.last_plan(session.handle))
    world.begin(session)
    if world.data.ConsumeBool():
        pool.free(session.handle, sequence_id.to_bytes(8, "little"))


def append(world: World, session: Session) -> None:
    data, num = world.data, world.data.ConsumeIntInRange(0, 3)
    ids = world.some_ids(session, num)
    counts = [data.ConsumeIntInRange(0, 3) for _ in range(num)]
    firsts, slots = world.positions(session, ids), world.column(4, num, 6)
    ahead = world.column(4, num, 9) if data.ConsumeBool() else b""
    tokens = world.column(4, sum(counts), 2)
    packed = b"".join(count.to_bytes(4, "little") for count in counts)
    world.pool.growth(session.handle, ids, firsts, slots, ahead)
    columns = ids, firsts, slots, packed, tokens, ahead
    if data.ConsumeBool() and world.pool.append(session.handle, *columns, only_if_sure=True):
        return
    world.pool.checkpoints(session.handle, ids)
    checkpoints = world.column(4, num, 9) if data.ConsumeBool() else b""
    world.pool.append(session.handle, *columns, checkpoints=checkpoints)
    world.pool.planned_checkpoints(session.handle, ids, checkpoints)


def truncate(world: World, session: Session) -> None:
    num = world.data.ConsumeIntInRange(0, 2)
    world.pool.truncate(session.handle, world.some_ids(session, num), world.column(4, num, 20))


def fork(world: World, session: Session) -> None:
    num = world.data.ConsumeIntInRange(0, 3)
    world.pool.fork(session.handle, world.some_ids(session, num), world.ids(num))


def free(world: World, session: Session) -> None:
    num = world.data.ConsumeIntInRange(0, 3)
    world.pool.free(session.handle, world.some_ids(session, num))


def pin(world: World, session: Session) -> None:
    """Prompts that may be cached; or a check."""
    data = world.data
    prompts = [world.prompt() or world.tokens(3) for _ in range(data.ConsumeIntInRange(0, 3))]
    counts = b"".join((len(each) // 4).to_bytes(4, "little") for each in prompts)
    check_as = session.number if data.ConsumeIntInRange(0, 7) == 7 else 0
    headroom, until_s = world.number(3), world.now_s + data.ConsumeIntInRange(1, 4)
    pins = world.ids(len(prompts))
    world.pool.pin(session.handle, pins, counts, b"".join(prompts), headroom, until_s, check_as)
    assert world.pool.num_pinned(session.handle) >= 0


def unpin(world: World, session: Session) -> None:
    world.pool.unpin(session.handle, world.ids(world.data.ConsumeIntInRange(0, 4)))


def swap(world: World, session: Session) -> None:
    """All at once, or the first part of it."""
    ids = world.some_ids(session, world.data.PickValueInList([1, 1, 1, 2, 3]))
    headroom = world.number(3) if world.data.ConsumeIntInRange(0, 7) == 7 else 0
    most = world.data.PickValueInList([MOST, 0, 1, 2])
    done = world.pool.swap(session.handle, ids, world.tier(), headroom, most)
    session.is_swapping = done is None


def cut(world: World, session: Session) -> None:
    """Or one that was to end with its plan."""
    end = world.pool.cut if world.data.ConsumeBool() else world.pool.finish_sequence
    end(session.handle, world.some_id(session))


def reserve(world: World, session: Session) -> None:
    """Blocks are given outside of a step."""
    world.finish(session)
    try:
        world.pool.reserve(session.handle, world.some_id(session), world.number(6))
    finally:
        world.begin(session)


def next_step(world: World, session: Session) -> None:
    world.finish(session)
    world.begin(session)


def prepare(world: World, session: Session) -> None:
    session.is_due = world.pool.prepare(session.handle, 1 + world.data.ConsumeIntInRange(0, 3))


def check(world: World, session: Session) -> None:
    """It changes nothing."""
    pool, handle, number = world.pool, session.handle, session.number + 1
    before = _shown(world, session)
    num = world.data.ConsumeIntInRange(0, 3)
    ids, tokens = world.some_ids(session, num), world.prompt()
    numbers, headroom = world.column(4, num, 9), world.number(3)
    for call, *columns in (
        (pool.admit, world.number(9), tokens, ids, num, 48, False, headroom),
        (pool.append, ids, world.positions(session, ids), numbers, bytes(4 * num), b"", numbers),
        (pool.truncate, ids, world.column(4, num, 20)),
        (pool.fork, ids, world.ids(num)),
        (pool.free, ids),
        (pool.swap, ids, world.tier(), headroom),
    ):
        with suppress(*REFUSALS):
            call(handle, *columns, check_as=number)
    assert _shown(world, session) == before


def _shown(world: World, session: Session) -> list[Any]:
    shown = [
        world.pool.states(session.handle, None),
        world.pool.sequence_ids(session.handle),
        world.pool.num_blocks_held(session.handle),
    ]
    for core in world.cores:
        shown += [(core.usage(tier), core.generations(tier)) for tier in (1, 2)]
        shown += [core.counters(), core.revision]
    return shown


def deferred(world: World, session: Session) -> None:
    ids, counts = world.some_ids(session, 1), world.column(4, 1, 4)
    tokens = world.column(4, 1, 2) * (int.from_bytes(counts[:1], "little") % 8)
    world.pool.deferred_tokens(
        session.handle, ids, world.column(8, 1, 9), world.column(4, 1, 20), counts, tokens
    )


def receipted(world: World, session: Session) -> None:
    """All at once, or the first part of it."""
    if not world.pool.plans_in_flight(session.handle):
        return
    plan = world.data.ConsumeIntInRange(0, world.pool.last_plan(session.handle))
    most = world.data.PickValueInList([MOST, MOST, 1, 2])
    with granted():
        if world.pool.receipted(session.handle, plan, most):
            session.receipting = plan


def abort(world: World, session: Session) -> None:
    """All at once, or the first part of it."""
    keeps_tables = world.data.PickValueInList([True, False])
    most = world.data.PickValueInList([MOST, MOST, 1, 2])
    with granted():
        if world.pool.abort(session.handle, session.number + 1, keeps_tables, most):
            session.aborting = keeps_tables
            return
    world.begin(session)


def end(world: World, session: Session) -> None:
    """Also while parts are left of what was begun."""
    most = world.data.PickValueInList([MOST, 0, 1])
    with granted():
        is_left = world.pool.end_session(session.handle, most)
    (world.ending if is_left else world.ended).append(session.handle)
    world.sessions[world.sessions.index(session)] = world.open(world.root())


def end_some(world: World, _: Session) -> None:
    if not world.ending:
        world.pool.end_some(world.unsigned(9, 32), 1)
        return
    most = world.data.ConsumeIntInRange(0, 2)
    with granted():
        if not world.pool.end_some(world.ending[-1], most):
            world.ended.append(world.ending.pop())


def fence(world: World, _: Session) -> None:
    if world.ended:
        with granted():
            world.pool.session_fenced(world.ended.pop())
    else:
        world.pool.session_fenced(world.unsigned(9, 32))


STEP_CALLS: tuple[Call, ...] = (
    admit, compute, compute, compute, compute, append, append, truncate, fork, free, swap, swap,
    pin, pin, unpin, cut, reserve, next_step, next_step, prepare, check, deferred, receipted,
    receipted, abort, end, end_some, fence,
)  # fmt: skip
