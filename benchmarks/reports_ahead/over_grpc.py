"""A control plane in a process of its own, which leads as soon as it may."""

from __future__ import annotations

import asyncio
import fcntl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.control_plane import resume
from benchmarks.control_plane.over_grpc import OverGrpc, Server
from benchmarks.reports_ahead.plane import Figures, Plane
from data_plane.server.registration_stream import (
    BLOCKS_PER_REPORT,
    RegistrationStream,
    report_differences,
)
from kvplane.transport.tls import open_channel
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import control_pb2_grpc


class Counted(RegistrationStream):
    """Counts the bytes that it sends."""

    num_bytes = 0

    async def send(self, request: cpb.RegisterRequest) -> None:
        self.num_bytes += request.ByteSize()
        await super().send(request)


class Threads:
    """In place of the executor's thread."""

    async def run(self, command: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(command)


@contextmanager
def held(path: Path) -> Iterator[Callable[[], None]]:
    """The election is this program's, until it gives it up."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(file, fcntl.LOCK_UN)


async def over_grpc(plane: Plane, change: Callable[[Plane], None] | None) -> Figures:
    """With a control plane in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, held(Path(folder) / "leader") as give_up:
        flags = ("--election", f"file:{folder}/leader")
        with Server(OverGrpc(is_gc_on=True), *flags) as server:
            async with open_channel(server.address, None) as channel:
                stub = control_pb2_grpc.ControlPlaneServiceStub(channel)
                if change is not None:
                    await _tell_ahead(stub, plane)
                    change(plane)
                give_up()
                while not await _answers(stub):
                    await asyncio.sleep(0.01)
                async with resume.waits_of_another(stub) as waits_s:
                    figures = await _lead(stub, plane)
                return replace(figures, longest_s=max(waits_s))


async def _answers(stub: Any) -> bool:
    try:
        await stub.DescribeControlPlane(cpb.DescribeControlPlaneRequest())
    except Exception:
        return False
    return True


async def _tell_ahead(stub: Any, plane: Plane) -> None:
    stream = RegistrationStream(stub.Register())
    hello = cpb.Hello()
    hello.CopyFrom(plane.hello)
    hello.is_ahead = True
    await stream.send(cpb.RegisterRequest(hello=hello))
    await stream.expect("welcome")
    for _ in range(2):
        await report_differences(stream, plane, Threads())  # type: ignore[arg-type]
    stream.cancel()


async def _lead(stub: Any, plane: Plane) -> Figures:
    began = time.perf_counter()
    stream = Counted(stub.Register())
    await stream.send(cpb.RegisterRequest(hello=plane.hello))
    if (await stream.expect("welcome")).welcome.compares:
        await report_differences(stream, plane, Threads())  # type: ignore[arg-type]
    else:
        for part in await asyncio.to_thread(plane.report, BLOCKS_PER_REPORT):
            await stream.send(cpb.RegisterRequest(report=part))
        await stream.expect("report_accepted")
    request = cpb.DescribePoolRequest(pool_id=plane.hello.pool_id)
    while not (described := await stub.DescribePool(request)).ready:
        await asyncio.sleep(0.002)
    seconds = time.perf_counter() - began
    stream.cancel()
    num_cached = described.usage.tiers[0].num_cached_blocks
    return Figures(seconds, stream.num_bytes, num_cached=num_cached)
