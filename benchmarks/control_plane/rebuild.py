"""Measures how long a control plane takes to learn a million published blocks from a report, to
send them again, and to forget them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.control_plane import messages, resume
from benchmarks.control_plane.engine import World
from benchmarks.control_plane.in_process import CorePool, InProcess
from benchmarks.control_plane.messages import BLOCK_SIZE_TOKENS, prompt, report_part
from benchmarks.control_plane.over_grpc import Connection, DataPlane, OverGrpc, server
from benchmarks.control_plane.report import MICROSECONDS, Row
from benchmarks.control_plane.sizes import Sizes
from kvplane import ops
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1.pool_pb2 import GetServerInfoRequest

_NAME = "rebuild_1M_blocks"
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
    resumed = resume.in_process(pool, num_blocks, num_entries)
    forget_s = pool.forget(_FIRST_BLOCK)
    slices_s = list(iter(pool.work, None))
    if num_left := pool.description().usage[0].num_cached_blocks:
        raise RuntimeError(f"{num_left} blocks were not forgotten")
    return [
        Row.of_one(_NAME, MICROSECONDS, 1e6 * sum(seconds)),
        Row.of_one(f"{_NAME}/longest_call", MICROSECONDS, 1e6 * max(seconds)),
        Row.of_one("forget_1M_blocks", MICROSECONDS, 1e6 * forget_s),
        Row.of_one(
            "forget_1M_blocks/longest_call", MICROSECONDS, 1e6 * max(forget_s, *slices_s, 0)
        ),
        *resumed,
    ]


async def _over_grpc(
    num_blocks: int, num_entries: int, parts: list[rpb.RegisterRequest]
) -> list[Row]:
    with ExitStack() as stack:
        async with (
            DataPlane(server(stack), messages.hello(num_blocks, 0)) as data_plane,
            Connection(data_plane.address, data_plane.key) as connection,
        ):
            await connection.server.GetServerInfo(GetServerInfoRequest())
            async with resume.waits_of_another(connection.server) as waits_s:
                began = time.perf_counter()
                await data_plane.report(parts)
                description = await connection.wait_ready()
                seconds = time.perf_counter() - began
            _check(description, num_entries)
            resumed = await resume.over_grpc(connection, data_plane, num_blocks, num_entries)
    return [
        Row.of_one(_NAME, MICROSECONDS, 1e6 * seconds),
        Row.of_one(f"{_NAME}/longest_wait", MICROSECONDS, 1e6 * max(waits_s)),
        *resumed,
    ]


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
