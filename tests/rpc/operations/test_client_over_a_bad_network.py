"""The client against a real control plane, when its first answer is lost, and through the end of a
lease. Steps whose answers are lost or given up are in ``tests/rpc/sdk``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from control_plane.server.server import ControlPlaneServer
from kvplane import ControlClient, ops
from kvplane.errors import SessionExpiredError
from tests.helpers.lossy_link import LossyLink
from tests.helpers.planning.control_wire import RawShard
from tests.helpers.planning.registration_messages import LAYOUT
from tests.helpers.waiting import until

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


async def test_a_session_whose_first_answer_is_lost_is_opened_once(
    control_server: ControlPlaneServer,
    client: ControlClient,
    proxy: LossyLink,
    shard: RawShard,
) -> None:
    await client.wait_ready(POOL)  # it has a connection then
    proxy.hold("answers")
    opening = asyncio.ensure_future(client.open_session(POOL, LAYOUT, "test"))
    await until(lambda: control_server.core.sessions.by_id)
    assert not opening.done()
    proxy.cut()
    session = await opening
    assert len(control_server.core.sessions.by_id) == 1
    await session.close()


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
