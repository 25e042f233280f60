"""A data plane's connection: what it is told and asked, and what a lost one brings about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from control_plane.server.server import ControlPlaneServer
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.planning.control_wire import RawSession, RawShard, Stub
from tests.helpers.planning.registration_messages import report

PROMPT = list(range(1, 21))

Connect = Callable[[ControlPlaneServer], Stub]


async def shard_failure(shard: RawShard) -> tuple[str, str, str]:
    failure = await shard.failure()
    error = from_rpc_error(failure)
    return failure.code().name, error.reason, error.field


async def is_ready(stub: Stub) -> bool:
    return (await stub.GetPool(pool_pb2.GetPoolRequest(pool_id="pool"))).ready


async def test_a_data_plane_is_welcomed_reports_and_is_accepted(
    stub: Stub, control_server: ControlPlaneServer
) -> None:
    shard = RawShard(stub)
    welcome = await shard.register()
    assert not welcome.resumed
    assert welcome.incarnation == control_server.core.incarnation
    assert len(welcome.key) == 32
    assert welcome.heartbeat_interval.seconds == 5
    await shard.report(report(last=False))
    assert not await is_ready(stub)
    await shard.report()
    assert await is_ready(stub)
    await RawSession.open(stub, shard)
    shard.hang_up()


INVALID = ("INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_a_hello_is_refused_by_the_name_of_its_field(stub: Stub) -> None:
    shard = RawShard(stub, version="")
    await shard.send(hello=shard.hello)
    assert await shard_failure(shard) == (*INVALID, "hello.version")
    assert list((await stub.ListPools(pool_pb2.ListPoolsRequest())).pool_ids) == []


async def test_messages_out_of_turn_end_the_stream(stub: Stub) -> None:
    early = RawShard(stub)
    await early.send(heartbeat=rpb.Heartbeat())
    assert await shard_failure(early) == (*INVALID, "hello")
    twice = RawShard(stub)
    await twice.register()
    await twice.send(hello=twice.hello)
    assert await shard_failure(twice) == (*INVALID, "hello")


async def test_a_data_plane_is_told_at_once_and_not_at_the_next_tick(
    control_server: ControlPlaneServer, stub: Stub, session: RawSession, shard: RawShard
) -> None:
    control_server.ticks.cancel()
    await session.admit(1, PROMPT)
    await session.submit()
    await shard.published(2)
    await stub.CloseSession(pb.CloseSessionRequest(session=session.ref))
    assert (await shard.receive()).fence.session == session.ref


@pytest.mark.parametrize("epoch", [11, 12, 2**62])
async def test_nobody_takes_the_shard_of_a_process_that_is_heard_of(
    stub: Stub, session: RawSession, shard: RawShard, epoch: int
) -> None:
    """Epoch, layout and incarnation are public; only the key shows that it is the same process."""
    rogue = RawShard(stub, epoch=epoch)
    rogue.hello.incarnation = shard.welcome.incarnation
    rogue.hello.key_id = bytes(16)
    await rogue.send(hello=rogue.hello)
    assert await shard_failure(rogue) == ("UNAVAILABLE", "POOL_NOT_READY", "hello.epoch")
    await session.admit(1, PROMPT)
    assert not shard.call.done()


async def test_a_process_that_is_silent_gives_way_to_its_successor(
    start_control_plane: Any, connect: Connect
) -> None:
    stub = connect(await start_control_plane(heartbeat_s=0.4))
    silent = await RawShard.joined(stub)
    await asyncio.sleep(0.7)
    successor = RawShard(stub, epoch=12)
    assert (await successor.register()).key != silent.key
    assert (await shard_failure(silent))[:2] == ("ABORTED", "STALE_EPOCH")
    successor.hang_up()


async def test_a_data_plane_is_not_gone_when_the_control_plane_was_held_up(
    start_control_plane: Any, connect: Connect
) -> None:
    server = await start_control_plane(heartbeat_s=0.2)
    shard = await RawShard.joined(connect(server))

    async def beat() -> None:
        while True:
            await shard.send(heartbeat=rpb.Heartbeat())
            await asyncio.sleep(0.1)

    beats = asyncio.create_task(beat())
    await asyncio.sleep(0.2)
    time.sleep(1.0)
    await asyncio.sleep(0.5)
    assert not shard.call.done()
    assert await is_ready(connect(server))
    beats.cancel()
    shard.hang_up()


async def test_a_data_plane_without_heartbeats_counts_as_gone(
    start_control_plane: Any, connect: Connect
) -> None:
    server = await start_control_plane(heartbeat_s=0.2)
    stub = connect(server)
    shard = RawShard(stub)
    welcome = await shard.register()
    assert welcome.heartbeat_interval.nanos == 200_000_000
    await shard.report()
    for _ in range(6):
        await asyncio.sleep(0.2)
        await shard.send(heartbeat=rpb.Heartbeat())
    assert await is_ready(stub)
    assert (await shard_failure(shard))[:2] == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    assert not await is_ready(stub)
