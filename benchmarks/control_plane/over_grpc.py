"""The control plane as a process of its own, reached over gRPC on loopback.

A Step is timed from the request message to the parsed answer, serialising included. The data plane
is simulated: it registers on a real stream and reads what it is sent, and the engines sign its
receipts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Final

import grpc.aio

from benchmarks.control_plane import messages
from benchmarks.control_plane.engine import Engine
from kvplane.transport.tls import open_channel
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import pool_pb2, pool_pb2_grpc, session_pb2_grpc
from kvplane.wire.v1 import session_pb2 as cpb
from scripts.planes import start

_HEARTBEAT_S: Final = 60.0
# A registration stream whose answers after the first ones are not parsed.
_REGISTER: Final = "/kvplane.plane.v1.RegistrationService/Register"


class StreamWire:
    """One session's StreamSteps stream. Answers come in the order of the requests."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._stream = stub.StreamSteps()
        self._writing, self._reading = asyncio.Lock(), asyncio.Lock()

    async def step(self, request: cpb.StepRequest) -> tuple[cpb.StepResponse, float]:
        message = cpb.StreamStepsRequest(step=request)
        began = time.perf_counter()
        async with self._writing:
            await self._stream.write(message)
        async with self._reading:
            response = await self._stream.read()
            while response is not grpc.aio.EOF and response.HasField("news"):
                response = await self._stream.read()
        seconds = time.perf_counter() - began
        if response is grpc.aio.EOF:
            raise RuntimeError("the control plane ended the stream")
        if response.HasField("error"):
            raise RuntimeError(f"a step was refused: {response.error}")
        return response.step, seconds

    async def abort(self, request: cpb.AbortPlansRequest) -> float:
        began = time.perf_counter()
        await self._stub.AbortPlans(request)
        return time.perf_counter() - began


class Connection:
    """A channel to a control plane, on which engines open sessions."""

    def __init__(self, address: str, key: bytes, *, first_engine: int = 0) -> None:
        """``key``: the pool's. ``first_engine``: number of engines of other processes before."""
        self.address = address
        self.key = key
        self.stub: Any = None
        self.server: Any = None
        self.pools: Any = None
        self._next_engine = first_engine

    async def __aenter__(self) -> Connection:
        self._channel = open_channel(self.address, None)
        self.stub = session_pb2_grpc.SessionServiceStub(self._channel)
        self.pools = pool_pb2_grpc.PoolServiceStub(self._channel)
        self.server = pool_pb2_grpc.ServerServiceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def wait_ready(self) -> pool_pb2.GetPoolResponse:
        """Return the pool's description as soon as it can be used."""
        request = pool_pb2.GetPoolRequest(pool_id=messages.POOL)
        while not (description := await self.pools.GetPool(request)).ready:
            await asyncio.sleep(0.002)
        return description

    async def engine(self) -> Engine:
        session = (await self.stub.OpenSession(messages.open_session())).session
        first_id = 1 + 1_000_000 * self._next_engine
        self._next_engine += 1
        return Engine(StreamWire(self.stub), session, self.key, first_id=first_id)


class DataPlane:
    """The data plane's end of a registration stream, for as long as a block of code runs."""

    def __init__(self, address: str, hello: rpb.Hello) -> None:
        self.address = address
        self._hello = hello

    async def __aenter__(self) -> DataPlane:
        """Register. The pool is ready after ``report``."""
        self._tasks: list[asyncio.Task[None]] = []
        self._channel = open_channel(self.address, None)
        serialize = rpb.RegisterRequest.SerializeToString
        open_stream: Any = self._channel.stream_stream(_REGISTER, request_serializer=serialize)
        self._stream = open_stream()
        await self._stream.write(rpb.RegisterRequest(hello=self._hello))
        self.welcome = (await self._read()).welcome
        self.key = self.welcome.key
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stream.cancel()
        await self._channel.close()

    async def report(self, parts: Iterable[rpb.RegisterRequest]) -> None:
        """Send a report, and follow the stream once it was accepted."""
        for part in parts:
            await self._stream.write(part)
        if not (await self._read()).HasField("report_accepted"):
            raise RuntimeError("the report was not accepted")
        self._tasks = [asyncio.create_task(self._drain()), asyncio.create_task(self._beat())]

    async def read(self) -> bytes:
        """Return the next message, packed; only where no report was accepted on the stream."""
        packed: bytes = await self._stream.read()
        return packed

    async def _read(self) -> rpb.RegisterResponse:
        return rpb.RegisterResponse.FromString(await self.read())

    async def _drain(self) -> None:
        while await self._stream.read() is not grpc.aio.EOF:
            pass

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self._stream.write(rpb.RegisterRequest(heartbeat=rpb.Heartbeat()))


def server(stack: ExitStack) -> str:
    """Run a control plane as a process that ends with ``stack``; return its address."""
    flags = ("--lease-s", "3600", "--heartbeat-s", str(_HEARTBEAT_S))
    # 256 prompts of 32,768 tokens in one step.
    flags += ("--max-message-bytes", str(1 << 26), "--metrics-port", "-1", "--log-level", "error")
    return start(stack, "control_plane", *flags).address


class OverGrpc:
    """A world whose control planes are processes of their own."""

    name = "grpc"

    @asynccontextmanager
    async def pool(
        self, num_device_blocks: int, num_host_blocks: int = 0
    ) -> AsyncIterator[Connection]:
        hello = messages.hello(num_device_blocks, num_host_blocks)
        with ExitStack() as stack:
            async with DataPlane(server(stack), hello) as data_plane:
                await data_plane.report([rpb.RegisterRequest(report=rpb.BlockReport(last=True))])
                async with Connection(data_plane.address, data_plane.key) as connection:
                    await connection.wait_ready()
                    yield connection
