"""Measures how long a control plane takes to send a million publications again, to a data plane
whose stream broke, and how long others wait meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from benchmarks.common.timing import drop_leftovers
from benchmarks.control_plane import messages
from benchmarks.control_plane.in_process import CorePool
from benchmarks.control_plane.messages import EPOCH, POOL
from benchmarks.control_plane.over_grpc import Connection, DataPlane
from benchmarks.control_plane.report import MICROSECONDS, Row
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1.pool_pb2 import GetServerInfoRequest

_NAME: Final = "resume_1M_blocks"


def in_process(pool: CorePool, num_blocks: int, num_entries: int) -> list[Row]:
    """Measure the calls for a full pool, in processor time of the thread."""
    hello = _hello(num_blocks, pool.core.incarnation, pool.key)
    pool.core.disconnect(POOL, 0, EPOCH)
    drop_leftovers()
    began = time.thread_time()
    if not pool.core.register(hello).resumed:
        raise RuntimeError("the data plane was not resumed")
    seconds = [time.thread_time() - began]
    num_sent = 0
    while True:
        began = time.thread_time()
        missed = pool.core.take_missed(POOL, 0)
        packed = [message.SerializeToString() for message in missed or ()]
        seconds.append(time.thread_time() - began)
        num_sent += sum(map(_num_publications, packed))
        if missed is None:
            break
    _check(num_sent, num_entries)
    return [
        Row.of_one(_NAME, MICROSECONDS, 1e6 * sum(seconds)),
        Row.of_one(f"{_NAME}/longest_call", MICROSECONDS, 1e6 * max(seconds)),
    ]


async def over_grpc(
    connection: Connection, data_plane: DataPlane, num_blocks: int, num_entries: int
) -> list[Row]:
    """Measure until the data plane has read everything, while another caller asks all the time."""
    hello = _hello(num_blocks, data_plane.welcome.incarnation, data_plane.key)
    drop_leftovers()
    async with (
        waits_of_another(connection.server) as waits_s,
        DataPlane(connection.address, hello) as again,
    ):
        began = time.perf_counter()
        num_sent = 0
        while num_sent < num_entries:
            num_sent += _num_publications(await again.read())
        seconds = time.perf_counter() - began
    _check(num_sent, num_entries)
    return [
        Row.of_one(_NAME, MICROSECONDS, 1e6 * seconds),
        Row.of_one(f"{_NAME}/longest_wait", MICROSECONDS, 1e6 * max(waits_s)),
    ]


@asynccontextmanager
async def waits_of_another(server: Any) -> AsyncIterator[list[float]]:
    """Collect the seconds that another caller, who asks all the time, waits for each answer."""
    waits_s: list[float] = []
    asking = asyncio.create_task(_ask_again_and_again(server, waits_s))
    try:
        yield waits_s
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking  # or its last wait would include this process's next work


async def _ask_again_and_again(server: Any, waits_s: list[float]) -> None:
    while True:
        began = time.perf_counter()
        try:
            await server.GetServerInfo(GetServerInfoRequest())
        finally:
            waits_s.append(time.perf_counter() - began)


def _hello(num_blocks: int, incarnation: int, key: bytes) -> rpb.Hello:
    hello = messages.hello(num_blocks, 0)
    hello.incarnation, hello.key_id = incarnation, signing.key_id(key)
    return hello


def _num_publications(packed: bytes) -> int:
    message = rpb.RegisterResponse.FromString(packed)
    return columns.count(INT32, message.publish.publications.indices)


def _check(num_sent: int, num_entries: int) -> None:
    if num_sent != num_entries:
        raise RuntimeError(f"{num_sent} publications were sent instead of {num_entries}")
