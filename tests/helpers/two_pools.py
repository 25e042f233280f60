"""Two pools of one layout and a session in each, between which a test moves blocks."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc.aio

from control_plane.server.config import ControlPlaneConfig
from control_plane.server.server import ControlPlaneServer
from data_plane.execution.table_blocks import BlockRange
from data_plane.server.config import DataPlaneConfig
from data_plane.server.push import chunks
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, DataClient, Execution, LayerGroup, Layout, Session, Tensor, ops
from kvplane.transport.connection import typed_errors
from kvplane.v1 import control_pb2, data_pb2, push_pb2, push_pb2_grpc
from kvplane.v1.types_pb2 import SignedPayload

LAYOUT = Layout("m", 8, "float32", "float32", (LayerGroup("full", (0, 1, 2), 1, 8),))
PROMPT = tuple(random.Random(7).choices(range(1000), k=28))  # three blocks and a half
NUM_BLOCKS = 4
HERE, THERE = "here", "there"
SEQUENCE = 1


def settings_of(pool_id: str, control_plane: str, layout: Path, **settings: Any) -> dict[str, Any]:
    """Of a data plane that sends to this machine and takes from it."""
    return {
        "control_plane": control_plane,
        "bind": "127.0.0.1:0",
        "pool_id": pool_id,
        "layout": layout,
        "num_device_blocks": 32,
        "num_host_blocks": 8,
        "num_threads": 1,
        "metrics_port": -1,
        "grace_s": 0.5,
        "push_bind": "127.0.0.1:0",
        "push_to": "127.0.0.1",
        **settings,
    }


def write_layout(folder: Path, layout: Layout = LAYOUT) -> Path:
    path = folder / "layout.json"
    path.write_text(json.dumps(asdict(layout)))
    return path


@asynccontextmanager
async def control_plane(**settings: Any) -> AsyncIterator[ControlPlaneServer]:
    defaults = {"bind": "127.0.0.1:0", "metrics_port": -1, "grace_s": 0.5}
    server = await ControlPlaneServer.start(ControlPlaneConfig(**{**defaults, **settings}))
    try:
        yield server
        server.core.check_integrity()
    finally:
        await server.stop()


@asynccontextmanager
async def data_plane(**settings: Any) -> AsyncIterator[DataPlaneServer]:
    server = await DataPlaneServer.start(DataPlaneConfig(**settings))
    try:
        yield server
        server.executor.check_integrity()
    finally:
        await server.stop()


class Side:
    """A session of one pool, and what speaks to its data plane."""

    def __init__(
        self, session: Session, data: DataClient, execution: Execution, plane: DataPlaneServer
    ) -> None:
        self.session = session
        self.data = data
        self.execution = execution
        self.plane = plane

    async def run(self, operation: control_pb2.Operation, positions: Sequence[int]) -> list[bytes]:
        """A step that computes the tokens at ``positions``; each layer's attention output."""
        result = (await self.session.step([operation])).raise_for_status()
        await self.execution.start(result.plan)
        outputs = [await self.layer(layer, positions) for layer in self.execution.layers]
        self.session.add_receipt(self.execution.receipt)
        await self.session.submit_receipts()
        return outputs

    async def layer(self, layer: int, positions: Sequence[int]) -> bytes:
        tensor = made_up(layer, positions)
        return bytes((await self.execution.layer(layer, tensor, tensor, tensor)).data)

    async def receive(self, plan: SignedPayload | None) -> data_pb2.PushTicket:
        assert plan is not None
        answer = await self.data.receive_blocks(self.session.grant, plan, SEQUENCE)
        return answer.ticket

    async def num_cached(self) -> int:
        """Tokens of the prompt that a session would find."""
        found = await self.session.lookup_prefix([*PROMPT, 0])
        return found.num_cached_tokens


class TwoPools:
    """``here`` has computed the prompt as the sequence ``SEQUENCE``."""

    def __init__(self, control: ControlClient, here: Side, there: Side) -> None:
        self.control = control
        self.here = here
        self.there = there

    async def chunks(self) -> list[push_pb2.PushBlocksRequest]:
        """What ``here`` would send: the ticket's place is empty, and a chunk for each block."""
        opening = push_pb2.OpenPush(
            source=self.here.plane.executor.block_source(),
            shard=self.here.plane.executor.shard.to_proto(),
        )
        requests = [push_pb2.PushBlocksRequest(open=opening)]
        for block in range(NUM_BLOCKS):
            read = await self.here.data.read_blocks(
                self.here.session.grant, SEQUENCE, first_block=block
            )
            place = BlockRange(SEQUENCE, block, 1, 0, 0, 3)
            chunk = chunks.chunk_of(place, read.blocks.data)
            requests.append(push_pb2.PushBlocksRequest(chunk=chunk))
        return requests


async def push(
    ticket: data_pb2.PushTicket, requests: Sequence[push_pb2.PushBlocksRequest]
) -> push_pb2.PushBlocksResponse:
    """Push as a data plane would, with the ticket in the first request."""
    if requests[0].HasField("open"):
        requests[0].open.secret = ticket.secret
    async with grpc.aio.insecure_channel(ticket.address) as channel:
        stub: Any = push_pb2_grpc.BlockPushServiceStub(channel)
        with typed_errors():
            answer: push_pb2.PushBlocksResponse = await stub.PushBlocks(iter(requests), timeout=60)
    return answer


def made_up(layer: int, positions: Sequence[int]) -> Tensor:
    """Numbers [num_tokens, 1, 8] that depend on the layer and the position."""
    numbers = [
        random.Random(1000 * position + layer).uniform(-1, 1) + i / 8
        for position in positions
        for i in range(8)
    ]
    return Tensor("float32", (len(positions), 1, 8), struct.pack(f"<{len(numbers)}f", *numbers))


@asynccontextmanager
async def side(control: ControlClient, plane: DataPlaneServer, pool_id: str) -> AsyncIterator[Side]:
    await control.wait_ready(pool_id, timeout_s=60)
    session = await control.open_session(pool_id, LAYOUT)
    data = DataClient(session.shards[0].address, timeout_s=60)
    async with session, data, await data.open(session.grant) as execution:
        yield Side(session, data, execution, plane)


@asynccontextmanager
async def two_pools(folder: Path, **there_settings: Any) -> AsyncIterator[TwoPools]:
    """``there_settings``: of the data plane that does not send."""
    layout = write_layout(folder)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(control_plane())
        planes = [
            await stack.enter_async_context(
                data_plane(**settings_of(pool_id, server.address, layout, **settings))
            )
            for pool_id, settings in ((HERE, {}), (THERE, there_settings))
        ]
        control = await stack.enter_async_context(ControlClient(server.address, timeout_s=60))
        here = await stack.enter_async_context(side(control, planes[0], HERE))
        there = await stack.enter_async_context(side(control, planes[1], THERE))
        pools = TwoPools(control, here, there)
        prompt = ops.admit(SEQUENCE, PROMPT, max_total_tokens=64)
        await here.run(prompt, range(len(PROMPT)))
        yield pools
