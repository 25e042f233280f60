"""Two pools of one layout and a session in each, between which a test pushes blocks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc.aio

from data_plane.blocks_from_outside import BlockRange
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, Layout, ops
from kvplane.integrations.push import chunks, push_pb2
from kvplane.integrations.push.client import PushClient
from kvplane.integrations.push.plug_in import PushPlugIn
from kvplane.integrations.push.push_pb2_grpc import BlockPushServiceStub
from kvplane.transport.connection import typed_errors
from kvplane.wire.v1.types_pb2 import SignedPayload
from tests.helpers import planes_in_process
from tests.helpers.planes_in_process import (
    LAYOUT,
    NUM_BLOCKS,
    PROMPT,
    SEQUENCE,
    Side,
    control_plane,
    write_layout,
)

HERE, THERE = "here", "there"
PUSHING = {"bind": "127.0.0.1:0", "to": "127.0.0.1"}
"""Settings of a data plane that sends to this machine and takes from it."""


def variables(**settings: str) -> dict[str, str]:
    """Return the plug-in's environment variables."""
    return {f"KVPLANE_PUSH_{name.upper()}": value for name, value in settings.items()}


def settings_of(pool_id: str, control_plane: str, layout: Path, **settings: Any) -> dict[str, Any]:
    """Return the settings of a data plane with the plug-in."""
    return planes_in_process.settings_of(
        pool_id, control_plane, layout, plug_ins="push", **settings
    )


@asynccontextmanager
async def data_plane(
    pushing: dict[str, str] = PUSHING, **settings: Any
) -> AsyncIterator[DataPlaneServer]:
    """``pushing``: settings of the plug-in."""
    async with AsyncExitStack() as stack:
        with patch.dict(os.environ, variables(**pushing)):
            plane = planes_in_process.data_plane(**settings)
            server = await stack.enter_async_context(plane)
        yield server


def push_of(plane: DataPlaneServer) -> PushPlugIn:
    (plug_in,) = plane.plug_ins
    assert isinstance(plug_in, PushPlugIn)
    return plug_in


class PushSide(Side):
    """``pushes`` calls the data plane's plug-in."""

    def __init__(self, side: Side, pushes: PushClient) -> None:
        super().__init__(side.control, side.session, side.execution, side.plane)
        self.pushes = pushes
        self.push = push_of(side.plane)

    async def receive(self, plan: SignedPayload | None) -> push_pb2.PushTicket:
        assert plan is not None
        answer = await self.pushes.receive_blocks(self.session.grant, plan, SEQUENCE)
        return answer.ticket


class TwoPools:
    """``here`` has computed the prompt as the sequence ``SEQUENCE``, unless pages are opaque."""

    def __init__(self, control: ControlClient, here: PushSide, there: PushSide) -> None:
        self.control = control
        self.here = here
        self.there = there

    async def chunks(self) -> list[push_pb2.PushBlocksRequest]:
        """Return what ``here`` would send: an opening without a ticket, then a chunk a block."""
        opening = push_pb2.OpenPush(
            layout_fingerprint=self.here.plane.executor.layout.fingerprint,
            shard=self.here.plane.executor.shard.to_proto(),
        )
        requests = [push_pb2.PushBlocksRequest(open=opening)]
        for block in range(NUM_BLOCKS):
            (read,) = await self.here.execution.read_blocks(SEQUENCE, block)
            place = BlockRange(SEQUENCE, block, 1, 0, 0, 3)
            chunk = chunks.chunk_of(place, read.blocks.data)
            requests.append(push_pb2.PushBlocksRequest(chunk=chunk))
        return requests


async def push(
    ticket: push_pb2.PushTicket, requests: Sequence[push_pb2.PushBlocksRequest]
) -> push_pb2.PushBlocksResponse:
    """Push as a data plane would, with the ticket in the first request."""
    if requests[0].HasField("open"):
        requests[0].open.secret = ticket.secret
    async with grpc.aio.insecure_channel(ticket.address) as channel:
        call = BlockPushServiceStub(channel).PushBlocks
        with typed_errors():
            answer: push_pb2.PushBlocksResponse = await call(iter(requests), timeout=60)
    return answer


@asynccontextmanager
async def side(
    control: ControlClient, plane: DataPlaneServer, pool_id: str
) -> AsyncIterator[PushSide]:
    async with (
        planes_in_process.side(control, plane, pool_id) as side,
        PushClient(side.session.shards[0].address, timeout_s=60) as pushes,
    ):
        yield PushSide(side, pushes)


@asynccontextmanager
async def two_pools(
    folder: Path, there_pushing: dict[str, str] = PUSHING, layout: Layout = LAYOUT
) -> AsyncIterator[TwoPools]:
    """``there_pushing``: settings of the plug-in of the data plane that does not send."""
    path = write_layout(folder, layout)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(control_plane())
        planes = [
            await stack.enter_async_context(
                data_plane(pushing, **settings_of(pool_id, server.address, path))
            )
            for pool_id, pushing in ((HERE, PUSHING), (THERE, there_pushing))
        ]
        control = await stack.enter_async_context(ControlClient(server.address, timeout_s=60))
        here = await stack.enter_async_context(side(control, planes[0], HERE))
        there = await stack.enter_async_context(side(control, planes[1], THERE))
        pools = TwoPools(control, here, there)
        if not layout.is_opaque:
            prompt = ops.admit(SEQUENCE, PROMPT, max_total_tokens=64)
            await here.run(prompt, range(len(PROMPT)))
        yield pools
