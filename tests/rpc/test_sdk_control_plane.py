"""The client against a real control plane, over a network that loses messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from control_plane.server.server import ControlPlaneServer
from kvplane import ControlClient, Session, StepResult, ops
from kvplane.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    NeverFitsError,
    PoolFullError,
    PoolNotFoundError,
    PoolNotReadyError,
    PositionMismatchError,
    SequenceExistsError,
    SequenceNotFoundError,
    SessionExpiredError,
    StaleIncarnationError,
    StepConflictError,
    TooManyPlansInFlightError,
)
from kvplane.layout import LayerGroup, Layout
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns
from kvplane.wire.protocol import PAYLOAD_VERSION
from tests.helpers.flaky_proxy import FlakyProxy
from tests.helpers.planning.control_wire import RawShard
from tests.helpers.planning.registration_messages import LAYOUT

StartServer = Callable[..., Awaitable[ControlPlaneServer]]
POOL = "pool"


@pytest.fixture
async def proxy(control_server: ControlPlaneServer) -> AsyncIterator[FlakyProxy]:
    async with FlakyProxy(control_server.address) as proxy:
        yield proxy


@pytest.fixture
async def client(proxy: FlakyProxy) -> AsyncIterator[ControlClient]:
    async with ControlClient(proxy.address) as client:
        yield client


@pytest.fixture
async def session(client: ControlClient, shard: RawShard) -> AsyncIterator[Session]:
    async with await client.open_session(POOL, LAYOUT, "test") as session:
        yield session


def int32(column: bytes) -> list[int]:
    return columns.read(columns.INT32, column, "column").tolist()


async def lose_the_answer(
    control_server: ControlPlaneServer,
    client: ControlClient,
    proxy: FlakyProxy,
    call: Awaitable[object],
) -> object:
    """Cut the connection when the plane has run ``call`` and its answer is under way."""
    before = fingerprint(control_server)
    proxy.hold_answers()
    task = asyncio.ensure_future(call)
    while fingerprint(control_server) == before:
        await asyncio.sleep(0.001)
    assert not task.done()
    proxy.cut()
    return await task


def fingerprint(control_server: ControlPlaneServer) -> object:
    pool = control_server.core.describe_pool(POOL)
    return pool.num_sequences, pool.usage


async def test_the_client_sees_what_the_plane_is(
    control_server: ControlPlaneServer, client: ControlClient, shard: RawShard
) -> None:
    description = await client.describe()
    assert description.incarnation == control_server.core.incarnation
    assert await client.list_pools() == [POOL]
    pool = await client.wait_ready(POOL)
    assert Layout.from_proto(pool.layout) == LAYOUT
    assert pool.shards[0].address == shard.hello.address


async def test_a_session_knows_its_terms(
    control_server: ControlPlaneServer, session: Session
) -> None:
    grant = tpb.SessionGrant.FromString(session.grant.payload)
    assert (grant.session, grant.pool_id, grant.tenant) == (session.ref, POOL, "default")
    assert grant.version == PAYLOAD_VERSION
    assert session.layout == LAYOUT
    assert (session.num_device_blocks, session.num_host_blocks) == (16, 8)
    assert session.max_plans_in_flight == 4
    assert session.time_to_live_s == pytest.approx(30)
    assert session.incarnation == control_server.core.incarnation
    assert [info.shard.index for info in session.shards] == [0]


async def test_a_pool_that_is_not_there_is_told_apart_from_one_that_is_not_ready(
    control_server: ControlPlaneServer, stub: object, client: ControlClient
) -> None:
    with pytest.raises(PoolNotFoundError):
        await client.open_session(POOL, LAYOUT)
    with pytest.raises(PoolNotReadyError):
        await client.wait_ready(POOL, 0.3)
    shard = RawShard(stub)  # type: ignore[arg-type]
    await shard.register()
    with pytest.raises(PoolNotReadyError):
        await client.open_session(POOL, LAYOUT, timeout_s=0.3)
    opening = asyncio.create_task(client.open_session(POOL, LAYOUT))
    await asyncio.sleep(0.1)
    await shard.report()
    session = await opening
    await session.close()
    shard.hang_up()


async def test_another_layout_does_not_get_a_session(
    client: ControlClient, shard: RawShard
) -> None:
    other = Layout("other", 8, "float32", "float32", (LayerGroup("full", (0, 1), 2, 8),))
    with pytest.raises(LayoutMismatchError):
        await client.open_session(POOL, other)


async def test_a_prompt_is_cached_for_others_once_its_receipt_is_in(
    session: Session, shard: RawShard
) -> None:
    prompt = list(range(20))
    admitted = await session.admit(1, prompt)
    assert admitted.results[0].admit.num_scheduled_tokens == 20
    assert (await session.lookup_prefix(prompt)).num_cached_tokens == 0
    session.add_receipt(shard.receipt(admitted.plan))
    again = await session.step([ops.admit(2, prompt)])
    assert again.results[0].admit.num_cached_tokens == 16
    assert (await session.describe_sequence(2)).num_cached_tokens == 16
    tables = [indices((await session.block_table(i)).tables[0]) for i in (1, 2)]
    assert tables[0][:2] == tables[1][:2]


def indices(blocks: tpb.Blocks) -> list[int]:
    return int32(blocks.indices)


async def test_a_prompt_is_not_cached_for_another_namespace(
    client: ControlClient, session: Session, shard: RawShard
) -> None:
    prompt = list(range(20))
    session.add_receipt(shard.receipt((await session.admit(1, prompt)).plan))
    await session.submit_receipts()
    assert (await session.lookup_prefix(prompt)).num_cached_tokens == 16
    async with await client.open_session(POOL, LAYOUT, namespace="adapter 3") as other:
        assert (await other.lookup_prefix(prompt)).num_cached_tokens == 0


async def test_operations_run_as_unary_calls_too(session: Session, shard: RawShard) -> None:
    def ran(plan: tpb.SignedPayload) -> None:
        session.add_receipt(shard.receipt(plan))

    ran((await session.admit(1, [1] * 12, max_total_tokens=24)).plan)
    with pytest.raises(PositionMismatchError) as caught:
        await session.append(1, [2], 1, first_position=11)
    assert caught.value.field == "operations[0].append.first_positions[0]"
    appended = await session.append(1, [2], 1, first_position=12)
    assert int32(appended.results[0].append.num_blocks) == [2]
    ran(appended.plan)
    forked = await session.fork(1, 2)
    assert int32(forked.results[0].fork.num_blocks) == [2]
    ran(forked.plan)
    swapped = await session.swap_out([1, 2])
    assert swapped.results[0].swap_out.num_blocks == 2
    ran(swapped.plan)
    ran((await session.swap_in([1, 2])).plan)
    await session.free(1)
    await session.submit_receipts()
    with pytest.raises(SequenceNotFoundError):
        await session.describe_sequence(1)


async def test_what_there_is_no_room_for_is_told_apart_from_what_never_fits(
    session: Session,
) -> None:
    await session.admit(1, [1] * 100)
    with pytest.raises(PoolFullError) as full:
        await session.admit(2, [2] * 100)
    assert full.value.retry_delay_s is not None
    with pytest.raises(NeverFitsError):
        await session.admit(2, [2] * 1000)
    with pytest.raises(SequenceExistsError):
        await session.admit(1, [1])
    with pytest.raises(InvalidRequestError) as caught:
        await session.admit(3, [])
    assert caught.value.field == "operations[0].admit.token_ids"


async def test_plans_in_flight_are_bounded(session: Session, shard: RawShard) -> None:
    plans = [(await session.admit(i, [i] * 4)).plan for i in range(1, 5)]
    with pytest.raises(TooManyPlansInFlightError):
        await session.admit(5, [5])
    assert session.last_number == 5
    session.add_receipt(shard.receipt(plans[0]))
    await session.admit(5, [5])
    assert session.last_number == 6


async def test_a_step_whose_answer_is_lost_runs_once(
    control_server: ControlPlaneServer,
    client: ControlClient,
    proxy: FlakyProxy,
    session: Session,
) -> None:
    step = session.step([ops.admit(1, [1] * 20)])
    result = await lose_the_answer(control_server, client, proxy, step)
    assert isinstance(result, StepResult)
    assert not result.results[0].failures
    assert tpb.Plan.FromString(result.plan.payload).number == session.last_number == 1
    assert proxy.num_connections == 2


async def test_a_unary_call_whose_answer_is_lost_runs_once(
    control_server: ControlPlaneServer,
    client: ControlClient,
    proxy: FlakyProxy,
    session: Session,
) -> None:
    admitted = await lose_the_answer(control_server, client, proxy, session.admit(1, [1] * 20))
    assert isinstance(admitted, StepResult)
    assert tpb.Plan.FromString(admitted.plan.payload).number == session.last_number == 1


async def test_a_step_that_ran_but_was_cancelled_is_answered_when_it_is_made_again(
    control_server: ControlPlaneServer, proxy: FlakyProxy, session: Session
) -> None:
    await cancel_after_it_ran(control_server, proxy, session)
    result = await session.step([ops.admit(1, [1] * 20)])
    assert not result.results[0].failures
    assert session.last_number == 1


async def test_a_step_that_ran_but_was_cancelled_leaves_its_plan_to_be_claimed(
    control_server: ControlPlaneServer, proxy: FlakyProxy, session: Session
) -> None:
    await cancel_after_it_ran(control_server, proxy, session)
    result = await session.step([ops.admit(2, [2] * 20)])
    plan = tpb.Plan.FromString(result.plan.payload)
    (abandoned,) = session.take_abandoned()
    assert (plan.number, plan.previous) == (2, abandoned.number)
    assert tpb.Plan.FromString(abandoned.answer.plan.payload).number == 1


async def cancel_after_it_ran(
    control_server: ControlPlaneServer, proxy: FlakyProxy, session: Session
) -> None:
    before = fingerprint(control_server)
    proxy.hold_answers()
    step = asyncio.create_task(session.step([ops.admit(1, [1] * 20)]))
    while fingerprint(control_server) == before:
        await asyncio.sleep(0.001)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    proxy.cut()


async def test_every_step_runs_once_however_often_the_connection_breaks(
    proxy: FlakyProxy, session: Session, shard: RawShard
) -> None:
    async def break_it() -> None:
        while True:
            await asyncio.sleep(random.uniform(0, 0.1))
            if random.random() < 0.5:
                proxy.hold_answers()
                await asyncio.sleep(random.uniform(0, 0.01))
            proxy.cut()

    result = await session.step([ops.admit(1, [7], max_total_tokens=64)])
    session.add_receipt(shard.receipt(result.plan))
    breaking = asyncio.create_task(break_it())
    for token in range(30):
        result = await session.step([ops.append(1, [token], 1, first_position=token + 1)])
        assert not result.results[0].failures
        session.add_receipt(shard.receipt(result.plan))
        await asyncio.sleep(random.uniform(0, 0.02))
    breaking.cancel()
    proxy.cut()
    await session.submit_receipts()
    state = await session.describe_sequence(1)
    assert (state.num_tokens, state.num_written_tokens) == (31, 31)
    assert session.last_number == 32
    assert proxy.num_connections > 5


async def test_an_aborted_plan_is_cut_back_to_what_was_written(
    session: Session, shard: RawShard
) -> None:
    first = await session.admit(1, [1] * 12, max_total_tokens=24)
    session.add_receipt(shard.receipt(first.plan))
    await session.append(1, [2], 1, first_position=12)
    (aborted,) = await session.abort_plan(session.last_number)
    assert (aborted.num_scheduled_tokens, aborted.admitted_by) == (12, 1)
    resynced = await session.resync()
    plan = tpb.Plan.FromString(resynced.plan.payload)
    assert (plan.number, plan.resync) == (session.last_number, True)
    changed = columns.read(columns.INT64, plan.changes.sequence_ids, "sequence_ids")
    assert changed.tolist() == [state.sequence_id for state in resynced.sequences] == [1]


async def test_a_number_used_behind_the_clients_back_does_not_lock_the_session(
    stub: object, session: Session
) -> None:
    step = pb.StepRequest(session=session.ref, number=1, operations=[ops.admit(9, [9])])
    await stub.RunStep(pb.RunStepRequest(step=step))  # type: ignore[attr-defined]
    with pytest.raises(StepConflictError):
        await session.admit(1, [1])
    resynced = await session.resync()
    assert [state.sequence_id for state in resynced.sequences] == [9]


async def test_a_lease_is_kept_by_the_client_and_lost_without_it(
    start_control_plane: StartServer, connect: Callable[[ControlPlaneServer], object]
) -> None:
    server = await start_control_plane(lease_s=0.5)
    shard = RawShard(connect(server))  # type: ignore[arg-type]
    await shard.register()
    await shard.report()
    async with ControlClient(server.address) as client:
        session = await client.open_session(POOL, LAYOUT)
        await session.admit(1, [1])
        await asyncio.sleep(1.2)
        assert (await session.describe_sequence(1)).num_tokens == 1
        await session.detach()
        await asyncio.sleep(1.2)
        assert session.ended_by is None
        with pytest.raises(SessionExpiredError, match="nothing had renewed its lease") as caught:
            await session.step([])
        assert session.ended_by is caught.value
        await server.stop()
        with pytest.raises(SessionExpiredError, match="nothing had renewed its lease"):
            await session.resync(timeout_s=0.2)
    shard.hang_up()


async def test_a_closed_session_gives_its_blocks_back(
    client: ControlClient, shard: RawShard
) -> None:
    async with await client.open_session(POOL, LAYOUT) as session:
        await session.admit(1, [1] * 20)
        assert (await client.describe_pool(POOL)).num_sequences == 1
    pool = await client.describe_pool(POOL)
    assert (pool.num_sessions, pool.num_sequences) == (0, 0)
    await session.close()


async def test_a_session_is_opened_again_after_the_control_plane_was_replaced(
    start_control_plane: StartServer, connect: Callable[[ControlPlaneServer], object]
) -> None:
    first = await start_control_plane()
    shard = RawShard(connect(first))  # type: ignore[arg-type]
    await shard.register()
    await shard.report()
    async with ControlClient(first.address, timeout_s=5) as client:
        session = await client.open_session(POOL, LAYOUT, "engine")
        await session.step([ops.admit(1, [1] * 20, max_total_tokens=40)])
        await first.stop()
        second = await start_control_plane(bind=first.address)
        shard = RawShard(connect(second), epoch=12)  # type: ignore[arg-type]
        await shard.register()
        await shard.report()
        with pytest.raises(StaleIncarnationError):
            await session.step([ops.append(1, [2], 1, first_position=20)])
        again = await session.reopen()
        assert again.id != session.id
        assert again.incarnation > session.incarnation
        assert (again.layout, again.client_name) == (session.layout, "engine")
        readmitted = await again.readmit({1: ([1] * 20, 40), 2: ([2] * 120, 0)})
        assert readmitted == {1: 0, 2: 0}, "nothing is computed yet"
        await again.close()
    shard.hang_up()


async def test_a_step_of_more_than_there_may_be_is_refused_and_the_next_one_runs(
    session: Session,
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await session.step([ops.free([1])] * 5000, timeout_s=5)
    assert refused.value.field == "operations"
    await session.step([ops.admit(1, range(8))], timeout_s=5)
