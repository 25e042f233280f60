"""Measures how long a control plane takes to learn a million published blocks from a report, and
to send them again to a data plane whose stream broke, while others wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

from benchmarks.common.timing import drop_leftovers
from benchmarks.control_plane import messages
from benchmarks.control_plane.engine import World
from benchmarks.control_plane.in_process import CorePool, InProcess
from benchmarks.control_plane.messages import BLOCK_SIZE_TOKENS, EPOCH, POOL, prompt, report_part
from benchmarks.control_plane.over_grpc import Connection, DataPlane, OverGrpc, server
from benchmarks.control_plane.report import MICROSECONDS, Row
from benchmarks.control_plane.sizes import Sizes
from kvplane import ops
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1.pool_pb2 import GetServerInfoRequest

_NAME = "rebuild_1M_blocks"
_RESUME = "resume_1M_blocks"
_FIRST_BLOCK = prompt(0, BLOCK_SIZE_TOKENS)  # of all prompts


async def rebuild_1m_blocks(world: World, sizes: Sizes) -> list[Row]:
    """Measure reports in parts of 2,048 blocks, and the longest time that others wait."""
    num_entries = sizes.num_rebuilt_prompts * sizes.prompt_blocks + 1
    num_blocks = num_entries + num_entries // 32
    parts = await published(num_blocks, sizes)
    if isinstance(world, OverGrpc):
        return await _over_grpc(num_blocks, num_entries, parts)
    return await _in_process(num_blocks, num_entries, parts)


async def _in_process(
    num_blocks: int, num_entries: int, parts: list[rpb.RegisterRequest]
) -> list[Row]:
    pool = CorePool(num_blocks)
    seconds = [pool.report(part.SerializeToString()) for part in parts]
    while (slice_s := pool.work()) is not None:
        seconds.append(slice_s)
    _check(pool.description(), num_entries)
    resumed = resumed_in_process(pool, num_blocks, num_entries)
    return [*_rows(_NAME, sum(seconds), "longest_call", max(seconds)), *resumed]


async def _over_grpc(
    num_blocks: int, num_entries: int, parts: list[rpb.RegisterRequest]
) -> list[Row]:
    with ExitStack() as stack:
        async with (
            DataPlane(server(stack), messages.hello(num_blocks, 0)) as data_plane,
            Connection(data_plane.address, data_plane.key) as connection,
        ):
            await connection.server.GetServerInfo(GetServerInfoRequest())
            async with waits_of_another(connection.server) as waits_s:
                began = time.perf_counter()
                await data_plane.report(parts)
                description = await connection.wait_ready()
                seconds = time.perf_counter() - began
            _check(description, num_entries)
            resumed = await resumed_over_grpc(connection, data_plane, num_blocks, num_entries)
    return [*_rows(_NAME, seconds, "longest_wait", max(waits_s)), *resumed]


def _check(description: pool_pb2.GetPoolResponse, num_entries: int) -> None:
    num_cached = description.usage[0].num_cached_blocks
    if num_cached != num_entries or not description.ready:
        raise RuntimeError(f"{num_cached} blocks were restored instead of {num_entries}")


async def published(num_blocks: int, sizes: Sizes) -> list[rpb.RegisterRequest]:
    """Return a report of prompts, which a control plane published in a pool of ``num_blocks``."""
    publications: list[rpb.PublishBlocks] = []

    def keep(outgoing: list[rpb.RegisterResponse]) -> None:
        publications.extend(each.publish for each in outgoing if each.HasField("publish"))

    async with InProcess().pool(num_blocks) as pool:
        pool.on_outgoing = keep
        engine = await pool.engine()
        for sequence_id in engine.new_ids(sizes.num_rebuilt_prompts):
            tokens = _FIRST_BLOCK + prompt(sequence_id, sizes.prompt_tokens)
            await engine.step(ops.admit(sequence_id, tokens))
            await engine.settle()
            await engine.step(ops.free([sequence_id]))
    return list(_parts(publications))


def _parts(publications: list[rpb.PublishBlocks]) -> Iterator[rpb.RegisterRequest]:
    for publication in publications:
        yield rpb.RegisterRequest(report=report_part(publication.publications))
    yield rpb.RegisterRequest(report=rpb.BlockReport(last=True))


def resumed_in_process(pool: CorePool, num_blocks: int, num_entries: int) -> list[Row]:
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
    _check_sent(num_sent, num_entries)
    return _rows(_RESUME, sum(seconds), "longest_call", max(seconds))


async def resumed_over_grpc(
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
    _check_sent(num_sent, num_entries)
    return _rows(_RESUME, seconds, "longest_wait", max(waits_s))


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


def _check_sent(num_sent: int, num_entries: int) -> None:
    if num_sent != num_entries:
        raise RuntimeError(f"{num_sent} publications were sent instead of {num_entries}")


def _rows(name: str, seconds: float, of_longest: str, longest_s: float) -> list[Row]:
    return [
        Row.of_one(name, MICROSECONDS, 1e6 * seconds),
        Row.of_one(f"{name}/{of_longest}", MICROSECONDS, 1e6 * longest_s),
    ]
