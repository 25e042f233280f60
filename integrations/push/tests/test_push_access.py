"""Who may push: over TLS, with an access list, and against what is refused where the memory is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from control_plane.server.config import ControlPlaneConfig
from control_plane.server.server import ControlPlaneServer
from data_plane.execution.table_blocks import BlockRange
from data_plane.server.config import DataPlaneConfig
from data_plane.server.push import chunks
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, DataClient, PrefixMover, Session, Tensor, TlsOptions
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    NotPermittedError,
    StaleGenerationError,
    UnauthenticatedError,
)
from kvplane.transport.connection import typed_errors
from kvplane.transport.tls import open_channel
from kvplane.v1 import push_pb2, push_pb2_grpc
from tests.helpers.data.data_server import author_of, serving
from tests.helpers.data.plan_author import set_blocks, span
from tests.helpers.listed_peers import Peers, listed
from tests.helpers.two_pools import HERE, LAYOUT, PROMPT, SEQUENCE, THERE, settings_of, write_layout

POOLS = f'["{HERE}", "{THERE}"]'


class TlsPools(Peers):
    """Two pools over TLS. All callers are in an access list, by their tokens."""

    planes: dict[str, DataPlaneServer]

    async def start(self) -> None:
        self.access_file.write_text(
            listed("engine-a", "engine-b", "plane").replace('["pool"]', POOLS)
        )
        self.control = await ControlPlaneServer.start(
            ControlPlaneConfig(bind="127.0.0.1:0", metrics_port=-1, grace_s=0.5, **self.serving())
        )
        plane = self.tls("plane")
        self.planes = {}
        for pool_id in (HERE, THERE):
            values = settings_of(
                pool_id,
                self.control.address,
                write_layout(self.folder),
                push_name=plane.server_name,
                control_plane_tls=True,
                control_plane_ca=plane.ca_file,
                control_plane_name=plane.server_name,
                control_plane_token_file=plane.token_file,
                **self.serving(),
            )
            self.planes[pool_id] = await DataPlaneServer.start(DataPlaneConfig(**values))

    async def stop(self) -> None:
        for server in (*self.planes.values(), self.control):
            await server.stop()


@pytest.fixture
async def peers(tmp_path: Path) -> AsyncIterator[TlsPools]:
    peers = TlsPools(tmp_path)
    await peers.start()
    yield peers
    await peers.stop()


async def compute(session: Session, tls: TlsOptions) -> None:
    async with (
        DataClient(session.shards[0].address, tls=tls) as data,
        await data.open(session.grant) as execution,
    ):
        await execution.start((await session.admit(SEQUENCE, PROMPT)).plan)
        key = Tensor("float32", (len(PROMPT), 1, 8), bytes(range(128)) * 7)
        for layer in execution.layers:
            await execution.layer(layer, key, key, key)
        session.add_receipt(execution.receipt)
        await session.submit_receipts()


async def ready(peers: TlsPools, name: str) -> ControlClient:
    control = peers.client(name)
    for pool_id in (HERE, THERE):
        await control.wait_ready(pool_id, timeout_s=60)
    return control


async def test_data_planes_push_over_tls_as_who_they_are(peers: TlsPools) -> None:
    tls = peers.tls("engine-a")
    async with (
        await ready(peers, "engine-a") as control,
        await control.open_session(HERE, LAYOUT) as here,
        await control.open_session(THERE, LAYOUT) as there,
    ):
        await compute(here, tls)
        async with PrefixMover(here, there, tls=tls) as mover:
            await mover.move(SEQUENCE, PROMPT)
        assert (await there.lookup_prefix([*PROMPT, 0])).num_cached_tokens == 24


@pytest.mark.parametrize(
    ("name", "error"), [("engine-a", NotPermittedError), ("nobody", UnauthenticatedError)]
)
async def test_a_ticket_is_of_no_use_to_who_is_no_data_plane(
    peers: TlsPools, name: str, error: type[KvplaneError]
) -> None:
    tls = peers.tls("engine-a")
    async with (
        await ready(peers, "engine-a") as control,
        await control.open_session(THERE, LAYOUT) as there,
        DataClient(there.shards[0].address, tls=tls) as data,
        open_channel(peers.planes[THERE].push.receiver.address, peers.tls(name)) as channel,
    ):
        plan = (await there.admit(SEQUENCE, PROMPT)).plan
        ticket = (await data.receive_blocks(there.grant, plan, SEQUENCE)).ticket
        opening = push_pb2.OpenPush(secret=ticket.secret)
        stub: Any = push_pb2_grpc.BlockPushServiceStub(channel)
        with pytest.raises(error), typed_errors():
            await stub.PushBlocks(iter([push_pb2.PushBlocksRequest(open=opening)]), timeout=60)
        assert len(peers.planes[THERE].push.receiver.tickets) == 1


async def test_another_tenant_gets_no_ticket(peers: TlsPools) -> None:
    async with (
        await ready(peers, "engine-a") as control,
        await control.open_session(THERE, LAYOUT) as there,
        DataClient(there.shards[0].address, tls=peers.tls("engine-b")) as data,
    ):
        plan = (await there.admit(SEQUENCE, PROMPT)).plan
        with pytest.raises(NotPermittedError, match="another tenant"):
            await data.receive_blocks(there.grant, plan, SEQUENCE)


async def test_a_block_that_was_allocated_again_is_not_written(tmp_path: Path) -> None:
    async with serving(tmp_path, push_bind="127.0.0.1:0") as (server, side):
        author, executor = author_of(server, side), server.executor
        async with DataClient(server.address) as data:
            plan = author.plan(1, changes=[set_blocks(1, [(0, 1), (1, 1)])], spans=[span(1, 0, 16)])
            ticket = (await data.receive_blocks(author.grant(1), plan, 1)).ticket
            taking = author.plan(1, session_id=2, changes=[set_blocks(1, [(1, 2)])])
            executor.start(author.grant(2), taking)
            before = executor.pools.device_tier.numpy().tobytes()
            shape = (2, 2, 2, 2, 8, 16)
            chunk = chunks.chunk_of(
                BlockRange(1, 0, 2, 0, 0, 2), b"\1" * Tensor.size_bytes("float32", shape)
            )
            opening = push_pb2.OpenPush(
                secret=ticket.secret,
                source=executor.block_source(),
                shard=executor.shard.to_proto(),
            )
            requests = [
                push_pb2.PushBlocksRequest(open=opening),
                push_pb2.PushBlocksRequest(chunk=chunk),
            ]
            async with grpc.aio.insecure_channel(ticket.address) as channel:
                stub: Any = push_pb2_grpc.BlockPushServiceStub(channel)
                with pytest.raises(StaleGenerationError), typed_errors():
                    await stub.PushBlocks(iter(requests), timeout=60)
            assert executor.pools.device_tier.numpy().tobytes() == before


@pytest.mark.parametrize("first", [b"\xff", b"\x0a\x05\x0a"])
async def test_bytes_that_are_no_request_are_refused_by_name(tmp_path: Path, first: bytes) -> None:
    async with serving(tmp_path, push_bind="127.0.0.1:0") as (server, _):
        assert server.push is not None
        async with grpc.aio.insecure_channel(server.push.receiver.address) as channel:
            push = channel.stream_unary("/kvplane.v1.BlockPushService/PushBlocks")
            with pytest.raises(InvalidRequestError), typed_errors():
                await push(iter([first]), timeout=60)
