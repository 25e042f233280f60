"""The control plane's end of registration streams, over a real socket, simulated by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from kvplane.wire import signing
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.plane.v1 import registration_pb2_grpc
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION
from kvplane.wire.v1 import types_pb2


class RegisterSide(registration_pb2_grpc.RegistrationServiceServicer):
    """Accepts every Hello, resumes those of its own incarnation, keeps received messages."""

    def __init__(self, incarnation: int = 1, *, heartbeat_s: float = 0.05) -> None:
        self.incarnation = incarnation
        self.key = signing.new_key()
        self.heartbeat_s = heartbeat_s
        self.payload_version = NEWEST_PAYLOAD_VERSION
        self.hellos: list[rpb.Hello] = []
        self.reports: list[rpb.BlockReport] = []
        """Parts of reports, as they came."""
        self.num_reports = 0
        """Whole ones."""
        self.fences_done: asyncio.Queue[types_pb2.SessionRef] = asyncio.Queue()
        self.heartbeats: asyncio.Queue[None] = asyncio.Queue()
        self.accepted = asyncio.Event()
        self._known_epochs: set[int] = set()
        self._num_streams = 0
        self._outbox: asyncio.Queue[rpb.RegisterResponse | None] = asyncio.Queue()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        registration_pb2_grpc.add_RegistrationServiceServicer_to_server(self, self._server)
        self.port = 0

    async def start(self, port: int = 0) -> RegisterSide:
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        await self._server.stop(0)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until ``reached``, for a while."""
        async with asyncio.timeout(20):
            while not reached():
                await asyncio.sleep(0.01)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def say(self, **message: Any) -> None:
        self._outbox.put_nowait(rpb.RegisterResponse(**message))

    def break_streams(self) -> None:
        """End every registration stream, as a lost network would."""
        for _ in range(self._num_streams):
            self._outbox.put_nowait(None)

    async def Register(
        self, request_iterator: AsyncIterator[rpb.RegisterRequest], context: Any
    ) -> AsyncIterator[rpb.RegisterResponse]:
        self._num_streams += 1
        self.accepted.clear()
        hello = (await anext(aiter(request_iterator))).hello
        self.hellos.append(hello)
        resumed = (
            hello.epoch in self._known_epochs
            and hello.incarnation == self.incarnation
            and hello.key_id == signing.key_id(self.key)
        )
        interval = Duration()
        interval.FromNanoseconds(int(self.heartbeat_s * 1e9))
        yield rpb.RegisterResponse(
            welcome=rpb.Welcome(
                version="test",
                payload_version=self.payload_version,
                incarnation=self.incarnation,
                resumed=resumed,
                key=self.key,
                heartbeat_interval=interval,
            )
        )
        self._known_epochs.add(hello.epoch)
        if resumed:
            self.accepted.set()
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (message := await self._outbox.get()) is not None:
                yield message
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream is broken")
        finally:
            reader.cancel()
            self._num_streams -= 1

    async def _read(self, requests: AsyncIterator[rpb.RegisterRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "report":
                self.reports.append(request.report)
                if request.report.last:
                    self.num_reports += 1
                    self.say(report_accepted=rpb.ReportAccepted())
                    self.accepted.set()
            elif kind == "fence_done":
                self.fences_done.put_nowait(request.fence_done.session)
            elif kind == "heartbeat":
                self.heartbeats.put_nowait(None)
