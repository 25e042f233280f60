"""A served data plane, the author of its plans, and what speaks to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import torch

from data_plane.execution.executor import Executor
from data_plane.kernels.backend import Kernels
from data_plane.server.server import DataPlaneServer
from data_plane.server.tensor_codec import tensor_to_message
from kvplane import DataClient, Tensor
from kvplane.transport.connection import typed_errors
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.data.data_server import author_of, serving
from tests.helpers.local_peer import LocalPeer
from tests.helpers.planning.control_wire import stub_of

REQUESTS: dict[str, type[Any]] = {
    "ReshapeAndCache": pb.RunLayerRequest,
    "PagedAttention": pb.RunLayerRequest,
    "CopyBlocks": pb.StartPlanRequest,
    "SwapBlocks": pb.StartPlanRequest,
    "ReadBlocks": pb.ReadBlocksRequest,
    "WriteBlocks": pb.WriteBlocksRequest,
    "LoadFileBlocks": pb.LoadFileBlocksRequest,
}


class Stream:
    """A raw execution stream."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def ask(self, **message: Any) -> pb.ExecuteResponse:
        if isinstance(plan := message.get("plan"), tpb.SignedPayload):
            message["plan"] = pb.StartPlanRequest(plan=plan)
        await self.call.write(pb.ExecuteRequest(**message))
        answer: pb.ExecuteResponse = await self.call.read()
        return answer


class Served:
    """A data plane that has registered with a control plane which the test plays."""

    def __init__(self, server: DataPlaneServer, side: Any, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.author = author_of(server, side)
        self.author.layout = server.executor.layout
        self.stub = stub_of(channel)

    @property
    def executor(self) -> Executor:
        return self.server.executor

    @property
    def memory(self) -> bytes:
        """A copy of both tiers."""
        tiers = self.executor.pools.device_tier, self.executor.pools.host_tier
        return b"".join(tier.view(torch.uint8).numpy().tobytes() for tier in tiers)

    def client(self, **settings: Any) -> DataClient:
        return DataClient(self.server.address, **settings)

    async def ask(self, method: str, **fields: Any) -> Any:
        """Make a unary call under the grant of session 1. Raises what it is refused with."""
        return await ask(self.stub, method, **{"grant": self.author.grant(), **fields})

    async def opened(self, session_id: int = 1) -> Stream:
        """Return an execution stream that is open."""
        stream = Stream(self.stub.Execute())
        opening = pb.OpenExecution(grant=self.author.grant(session_id))
        assert (await stream.ask(open=opening)).HasField("opened")
        return stream

    async def joined(self, session_id: int = 1) -> LocalPeer:
        """Return an execution over shared memory."""
        return await LocalPeer.joined(self.stub, self.author.grant(session_id))

    async def num_native(self) -> int:
        """Return the packets of the only connection that native code has answered: it says so when
        something else is to be done.
        """
        (connection,) = self.server.local._connections.values()
        return await self.server._worker.run(lambda: connection._layers.num_served)


@asynccontextmanager
async def served(
    folder: Path, kernels: Kernels | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """Serve a data plane until the body ends; then check its integrity."""
    async with (
        serving(folder, kernels, **settings) as (server, side),
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield Served(server, side, channel)


async def ask(stub: Any, method: str, **fields: Any) -> Any:
    """Make a unary call; tensors are sent as messages. Raises what it is refused with."""
    request = REQUESTS[method](**{name: _sent(value) for name, value in fields.items()})
    with typed_errors():
        return await getattr(stub, method)(request)


def _sent(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_to_message(value)
    return value.to_proto() if hasattr(value, "to_proto") else value


def received(message: tpb.Tensor) -> torch.Tensor:
    """Return the tensor in a message."""
    tensor: torch.Tensor = Tensor.from_proto(message).torch()
    return tensor
