"""A control plane on a free loopback port, and what speaks to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from control_plane.server.server import ControlPlaneServer
from kvplane import ControlClient, DataClient, Layout
from tests.helpers.both_planes import POOL, Planes
from tests.helpers.planes_in_process import control_plane
from tests.helpers.planning.control_wire import RawSession, RawShard, Stub, stub_of
from tests.helpers.planning.operations_world import World
from tests.helpers.planning.registration_messages import LAYOUT

StartServer = Callable[..., Awaitable[ControlPlaneServer]]
StartWorld = Callable[..., Awaitable[World]]


@pytest.fixture(params=[True, False], ids=["shared memory", "grpc"])
def shared_memory(request: pytest.FixtureRequest) -> bool:
    """The transports of an execution's tensors. Whether a client gets shared memory on its own
    machine is tested by ``test_local_executions``.
    """
    wanted: bool = request.param
    return wanted


@pytest.fixture
async def start_control_plane() -> AsyncIterator[StartServer]:
    """Start control planes with the settings given; each ends with its integrity checked."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> ControlPlaneServer:
            server = control_plane(**{"grace_s": 2.0, **settings})
            return await stack.enter_async_context(server)

        yield start


@pytest.fixture
async def control_server(start_control_plane: StartServer) -> ControlPlaneServer:
    """A control plane of default settings."""
    return await start_control_plane()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[ControlPlaneServer], Stub]]:
    """Make raw stubs of servers; their channels close with the test."""
    channels: list[grpc.aio.Channel] = []

    def make(server: ControlPlaneServer) -> Stub:
        channel = grpc.aio.insecure_channel(server.address)
        channels.append(channel)
        return stub_of(channel)

    yield make
    for channel in channels:
        await channel.close()


@pytest.fixture
async def stub(
    control_server: ControlPlaneServer, connect: Callable[[ControlPlaneServer], Stub]
) -> Stub:
    """A raw stub of ``control_server``."""
    return connect(control_server)


@pytest.fixture
async def shard(stub: Stub) -> AsyncIterator[RawShard]:
    """A data plane that has registered with ``control_server`` and reported nothing."""
    shard = await RawShard.joined(stub)
    yield shard
    shard.hang_up()


@pytest.fixture
async def session(stub: Stub, shard: RawShard) -> RawSession:
    """A session on ``shard``'s pool."""
    return await RawSession.open(stub, shard)


@pytest.fixture
async def start_world(
    start_control_plane: StartServer, connect: Callable[[ControlPlaneServer], Stub]
) -> AsyncIterator[StartWorld]:
    """Start a control plane with one pool, which admissions may fill to the last block."""
    async with AsyncExitStack() as stack:

        async def start(
            layout: Layout = LAYOUT,
            *,
            num_device_blocks: int = 16,
            num_host_blocks: int = 8,
            hello: dict[str, Any] | None = None,
            **settings: Any,
        ) -> World:
            server = await start_control_plane(**{"watermark": 0.0, **settings})
            client = await stack.enter_async_context(ControlClient(server.address))
            world = World(server, client, connect(server))
            shard = await world.register(
                layout,
                num_device_blocks=num_device_blocks,
                num_host_blocks=num_host_blocks,
                **(hello or {}),
            )
            stack.callback(shard.hang_up)
            return world

        yield start


@pytest.fixture
async def planes(tmp_path: Path) -> AsyncIterator[Planes]:
    """Both planes, and a pool of 32 device and 8 host blocks of 8 tokens each."""
    async with Planes(tmp_path) as planes:
        yield planes


@pytest.fixture
async def control(planes: Planes) -> AsyncIterator[ControlClient]:
    async with ControlClient(planes.control.address) as client:
        await client.wait_ready(POOL)
        yield client


@pytest.fixture
async def data(planes: Planes) -> AsyncIterator[DataClient]:
    async with DataClient(planes.data.address) as client:
        yield client
