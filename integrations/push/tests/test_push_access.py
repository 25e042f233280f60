"""Tests who may push over TLS and with an access list, and what the memory's owner refuses."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio
import pytest
from two_pools import HERE, PUSHING, THERE, data_plane, push_of, settings_of, variables

from data_plane.blocks_from_outside import BlockRange
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, DataClient, Session, Tensor, Tls, ops
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    NotPermittedError,
    StaleGenerationError,
    UnauthenticatedError,
)
from kvplane.integrations.push import chunks, push_pb2
from kvplane.integrations.push.client import PrefixMover, PushClient
from kvplane.integrations.push.push_pb2_grpc import BlockPushServiceStub
from kvplane.integrations.push.receiver import PUSH_BLOCKS
from kvplane.transport.connection import typed_errors
from kvplane.transport.tls import open_channel
from tests.helpers.data.data_server import author_of, serving
from tests.helpers.data.plan_author import set_blocks, span
from tests.helpers.listed_peers import Peers, listed
from tests.helpers.planes_in_process import LAYOUT, PROMPT, SEQUENCE, control_plane, write_layout

POOLS = f'["{HERE}", "{THERE}"]'


class TlsPools(Peers):
    """Two pools over TLS. All callers are in an access list, by their tokens."""

    planes: dict[str, DataPlaneServer]


@pytest.fixture
async def peers(tmp_path: Path) -> AsyncIterator[TlsPools]:
    peers = TlsPools(tmp_path)
    peers.access_file.write_text(listed("engine-a", "engine-b", "plane").replace('["pool"]', POOLS))
    settings = peers.registering()
    async with AsyncExitStack() as stack:
        peers.control = await stack.enter_async_context(control_plane(**peers.serving()))
        peers.planes = {}
        for pool_id in (HERE, THERE):
            layout = write_layout(tmp_path)
            values = settings_of(pool_id, peers.control.address, layout, **settings)
            started = data_plane({**PUSHING, "name": settings["tls_name"]}, **values)
            peers.planes[pool_id] = await stack.enter_async_context(started)
        yield peers


async def compute(session: Session, tls: Tls) -> None:
    async with (
        DataClient(session.shards[0].address, tls=tls) as data,
        await data.open(session.grant) as execution,
    ):
        await execution.start((await session.run(ops.admit(SEQUENCE, PROMPT))).plan)
        key = Tensor("float32", (len(PROMPT), 1, 8), bytes(range(128)) * 7)
        for layer in execution.layers:
            await execution.layer(layer, key, key, key)
        session.add_receipt(*execution.receipts)
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
        (found,) = await control.find_prefix(PROMPT, pool_ids=[THERE])
        assert found.num_cached_tokens == 24


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
        PushClient(there.shards[0].address, tls=tls) as pushes,
        open_channel(push_of(peers.planes[THERE]).receiver.address, peers.tls(name)) as channel,
    ):
        plan = (await there.run(ops.admit(SEQUENCE, PROMPT))).plan
        ticket = (await pushes.receive_blocks(there.grant, plan, SEQUENCE)).ticket
        opening = push_pb2.OpenPush(secret=ticket.secret)
        call = BlockPushServiceStub(channel).PushBlocks
        with pytest.raises(error), typed_errors():
            await call(iter([push_pb2.PushBlocksRequest(open=opening)]), timeout=60)
        assert len(push_of(peers.planes[THERE]).receiver.tickets) == 1


async def test_another_tenant_gets_no_ticket(peers: TlsPools) -> None:
    async with (
        await ready(peers, "engine-a") as control,
        await control.open_session(THERE, LAYOUT) as there,
        PushClient(there.shards[0].address, tls=peers.tls("engine-b")) as pushes,
    ):
        plan = (await there.run(ops.admit(SEQUENCE, PROMPT))).plan
        with pytest.raises(NotPermittedError, match="another tenant"):
            await pushes.receive_blocks(there.grant, plan, SEQUENCE)


@asynccontextmanager
async def taking(folder: Path) -> AsyncIterator[tuple[DataPlaneServer, Any]]:
    """Serve a data plane as ``serving`` does, with the plug-in."""
    async with AsyncExitStack() as stack:
        with patch.dict(os.environ, variables(bind="127.0.0.1:0")):
            served = await stack.enter_async_context(serving(folder, plug_ins="push"))
        yield served


async def test_a_block_that_was_allocated_again_is_not_written(tmp_path: Path) -> None:
    async with (
        taking(tmp_path) as (server, side),
        PushClient(server.address) as pushes,
    ):
        author, executor = author_of(server, side), server.executor
        plan = author.plan(1, changes=[set_blocks(1, [(0, 1), (1, 1)])], spans=[span(1, 0, 16)])
        ticket = (await pushes.receive_blocks(author.grant(1), plan, 1)).ticket
        retaking = author.plan(1, session_id=2, changes=[set_blocks(1, [(1, 2)])])
        executor.start(author.grant(2), retaking)
        before = executor.pools.device_tier.numpy().tobytes()
        shape = (2, 2, 2, 2, 8, 16)
        chunk = chunks.chunk_of(
            BlockRange(1, 0, 2, 0, 0, 2), b"\1" * Tensor.size_bytes("float32", shape)
        )
        opening = push_pb2.OpenPush(
            secret=ticket.secret,
            layout_fingerprint=executor.layout.fingerprint,
            shard=executor.shard.to_proto(),
        )
        requests = [
            push_pb2.PushBlocksRequest(open=opening),
            push_pb2.PushBlocksRequest(chunk=chunk),
        ]
        async with grpc.aio.insecure_channel(ticket.address) as channel:
            call = BlockPushServiceStub(channel).PushBlocks
            with pytest.raises(StaleGenerationError), typed_errors():
                await call(iter(requests), timeout=60)
        assert executor.pools.device_tier.numpy().tobytes() == before


@pytest.mark.parametrize("first", [b"\xff", b"\x0a\x05\x0a"])
async def test_bytes_that_are_no_request_are_refused_by_name(tmp_path: Path, first: bytes) -> None:
    async with (
        taking(tmp_path) as (server, _),
        grpc.aio.insecure_channel(push_of(server).receiver.address) as channel,
    ):
        push = channel.stream_unary(PUSH_BLOCKS)
        with pytest.raises(InvalidRequestError), typed_errors():
            await push(iter([first]), timeout=60)
