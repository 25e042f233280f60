"""The client against a real control plane, over a network that loses messages, and through the end
of a lease.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from control_plane.server.server import ControlPlaneServer
from kvplane import ControlClient, Session, StepResult, ops
from kvplane.errors import (
    SessionExpiredError,
)
from kvplane.session import AbortResult
from kvplane.wire.plane.v1 import plan_pb2
from tests.helpers.lossy_link import LossyLink
from tests.helpers.planning.control_wire import RawShard
from tests.helpers.planning.registration_messages import LAYOUT

StartServer = Callable[..., Awaitable[ControlPlaneServer]]
POOL = "pool"


@pytest.fixture
async def proxy(control_server: ControlPlaneServer) -> AsyncIterator[LossyLink]:
    async with LossyLink(control_server.address) as proxy:
        yield proxy


@pytest.fixture
async def client(proxy: LossyLink) -> AsyncIterator[ControlClient]:
    async with ControlClient(proxy.address) as client:
        yield client


@pytest.fixture
async def session(client: ControlClient, shard: RawShard) -> AsyncIterator[Session]:
    async with await client.open_session(POOL, LAYOUT, "test") as session:
        yield session


async def lose_the_answer(
    control_server: ControlPlaneServer,
    client: ControlClient,
    proxy: LossyLink,
    call: Awaitable[object],
) -> object:
    """Cut the connection when the plane has run ``call`` and its answer is under way."""
    before = fingerprint(control_server)
    proxy.hold("answers")
    task = asyncio.ensure_future(call)
    while fingerprint(control_server) == before:
        await asyncio.sleep(0.001)
    assert not task.done()
    proxy.cut()
    return await task


def fingerprint(control_server: ControlPlaneServer) -> object:
    core = control_server.core
    return (
        core.observe_pool(POOL).num_sequences,
        core.get_pool(POOL).usage,
        len(core.sessions.by_id),
    )


async def test_a_session_whose_first_answer_is_lost_is_opened_once(
    control_server: ControlPlaneServer,
    client: ControlClient,
    proxy: LossyLink,
    shard: RawShard,
) -> None:
    await client.wait_ready(POOL)  # it has a connection then
    opening = client.open_session(POOL, LAYOUT, "test")
    session = await lose_the_answer(control_server, client, proxy, opening)
    assert isinstance(session, Session)
    assert len(control_server.core.sessions.by_id) == 1
    await session.close()


async def test_a_step_and_a_unary_call_whose_answers_are_lost_run_once(
    control_server: ControlPlaneServer,
    client: ControlClient,
    proxy: LossyLink,
    session: Session,
) -> None:
    step = session.step([ops.admit(1, [1] * 20)])
    result = await lose_the_answer(control_server, client, proxy, step)
    assert isinstance(result, StepResult)
    assert not result.results[0].failures
    assert plan_pb2.Plan.FromString(result.plan.payload).number == session.last_number == 1
    assert proxy.num_connections == 2
    aborted = await lose_the_answer(control_server, client, proxy, session.abort_plans(1))
    assert isinstance(aborted, AbortResult)
    assert [state.num_scheduled_tokens for state in aborted.sequences] == [0]
    resynced = await session.abort_plans(whole_tables=True)
    assert [state.sequence_id for state in resynced.sequences] == [1]
    plan = plan_pb2.Plan.FromString(resynced.plan.payload)
    assert (plan.number, plan.resync) == (session.last_number, True) == (3, True)


async def test_a_step_that_ran_but_was_cancelled_is_answered_again_or_left_to_be_claimed(
    control_server: ControlPlaneServer, proxy: LossyLink, session: Session
) -> None:
    await cancel_after_it_ran(control_server, proxy, session, sequence_id=1)
    again = await session.step([ops.admit(1, [1] * 20)])
    assert plan_pb2.Plan.FromString(again.plan.payload).number == session.last_number == 1
    await cancel_after_it_ran(control_server, proxy, session, sequence_id=2)
    other = await session.step([ops.admit(3, [3] * 20)])
    plan = plan_pb2.Plan.FromString(other.plan.payload)
    (abandoned,) = session.take_abandoned()
    assert (plan.number, plan.previous) == (3, abandoned.number)
    assert plan_pb2.Plan.FromString(abandoned.answer.plan.payload).number == 2


async def cancel_after_it_ran(
    control_server: ControlPlaneServer, proxy: LossyLink, session: Session, sequence_id: int
) -> None:
    before = fingerprint(control_server)
    proxy.hold("answers")
    step = asyncio.create_task(session.step([ops.admit(sequence_id, [sequence_id] * 20)]))
    while fingerprint(control_server) == before:
        await asyncio.sleep(0.001)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    proxy.cut()


async def test_every_step_runs_once_however_often_the_connection_breaks(
    proxy: LossyLink, session: Session, shard: RawShard
) -> None:
    async def break_it() -> None:
        while True:
            await asyncio.sleep(random.uniform(0, 0.1))
            if random.random() < 0.5:
                proxy.hold("answers")
                await asyncio.sleep(random.uniform(0, 0.01))
            proxy.cut()

    result = await session.step([ops.admit(1, [7], max_total_tokens=64)])
    session.add_receipt(shard.receipt(result.plan))
    breaking = asyncio.create_task(break_it())
    for token in range(30):
        result = await session.step([ops.append(1, [token], 1, first_positions=token + 1)])
        assert not result.results[0].failures
        session.add_receipt(shard.receipt(result.plan))
        await asyncio.sleep(random.uniform(0, 0.02))
    breaking.cancel()
    proxy.cut()
    await session.submit_receipts()
    state = (await session.list_sequences([1]))[0]
    assert (state.num_tokens, state.num_written_tokens) == (31, 31)
    assert session.last_number == 32
    assert proxy.num_connections > 5


async def test_a_lease_is_kept_by_the_client_and_lost_without_it(
    start_control_plane: StartServer, connect: Callable[[ControlPlaneServer], object]
) -> None:
    server = await start_control_plane(lease_s=0.5)
    shard = await RawShard.joined(connect(server))  # type: ignore[arg-type]
    async with ControlClient(server.address) as client:
        session = await client.open_session(POOL, LAYOUT)
        await session.run(ops.admit(1, [1]))
        await asyncio.sleep(1.2)
        assert ((await session.list_sequences([1]))[0]).num_tokens == 1
        await session.detach()
        await asyncio.sleep(1.2)
        assert session.ended_by is None
        with pytest.raises(SessionExpiredError, match="nothing had renewed its lease") as caught:
            await session.step([ops.free([])])
        assert session.ended_by is caught.value
        await server.stop()
        with pytest.raises(SessionExpiredError, match="nothing had renewed its lease"):
            await session.abort_plans(whole_tables=True, timeout_s=0.2)
    shard.hang_up()
