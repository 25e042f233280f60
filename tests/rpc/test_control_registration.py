"""A data plane's connection: what it is told and asked, who may follow whom, and what a lost one
brings about.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from control_plane.server.server import ControlPlaneServer
from kvplane import ops
from kvplane.layout import LayerGroup, Layout
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.control_wire import PATIENCE_S, RawSession, RawShard, Stub
from tests.helpers.planning.registration_messages import blocks, half, publications, report

PROMPT = list(range(1, 21))
SCALED = Layout(
    "m", 8, "float32", "float8_e4m3fn", (LayerGroup("full", (0, 1), 2, 8, key_scales=(0.5, 0.25)),)
)

Connect = Callable[[ControlPlaneServer], Stub]


async def shard_failure(shard: RawShard) -> tuple[str, str, str]:
    failure = await shard.failure()
    error = from_rpc_error(failure)
    return failure.code().name, error.reason, error.field


async def is_ready(stub: Stub) -> bool:
    return (await stub.GetPool(pool_pb2.GetPoolRequest(pool_id="pool"))).ready


async def counters_of(stub: Stub) -> Mapping[str, int]:
    answer = await stub.GetPoolCounters(pool_pb2.GetPoolCountersRequest(pool_id="pool"))
    counters: Mapping[str, int] = answer.counters
    return counters


async def until(condition: Callable[[], Any]) -> None:
    """Wait until an awaitable condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.02)


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


@pytest.mark.parametrize(
    ("fields", "code", "reason", "field"),
    [
        ({"pool_id": ""}, "INVALID_ARGUMENT", "INVALID_REQUEST", "hello.pool_id"),
        ({"version": ""}, "INVALID_ARGUMENT", "INVALID_REQUEST", "hello.version"),
        ({"version": "x" * 129}, "INVALID_ARGUMENT", "INVALID_REQUEST", "hello.version"),
        (
            {"oldest_payload_version": 0},
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "hello.oldest_payload_version",
        ),
        (
            {"oldest_payload_version": 3, "newest_payload_version": 2},
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "hello.newest_payload_version",
        ),
        (
            {"oldest_payload_version": 9, "newest_payload_version": 9},
            "FAILED_PRECONDITION",
            "PROTOCOL_MISMATCH",
            "hello.newest_payload_version",
        ),
        ({"layout": tpb.Layout()}, "INVALID_ARGUMENT", "INVALID_REQUEST", "hello.layout.dtype"),
        (
            {"num_device_blocks": -(2**31)},
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "hello.num_device_blocks",
        ),
        (
            {"incarnation": 2**64 - 1},
            "ABORTED",
            "STALE_INCARNATION",
            "hello.incarnation",
        ),
    ],
)
async def test_a_hello_is_refused_when(
    stub: Stub, fields: dict[str, Any], code: str, reason: str, field: str
) -> None:
    shard = RawShard(stub, **fields)
    await shard.send(hello=shard.hello)
    assert await shard_failure(shard) == (code, reason, field)
    assert list((await stub.ListPools(pool_pb2.ListPoolsRequest())).pool_ids) == []


async def leave(stub: Stub, shard: RawShard) -> None:
    """The process is gone, and the control plane knows."""
    shard.hang_up()
    async with asyncio.timeout(PATIENCE_S):
        while await is_ready(stub):
            await asyncio.sleep(0.01)


async def test_messages_out_of_turn_end_the_stream(stub: Stub) -> None:
    early = RawShard(stub)
    await early.send(heartbeat=rpb.Heartbeat())
    assert await shard_failure(early) == ("INVALID_ARGUMENT", "INVALID_REQUEST", "hello")
    twice = RawShard(stub)
    await twice.register()
    await twice.send(hello=twice.hello)
    assert await shard_failure(twice) == ("INVALID_ARGUMENT", "INVALID_REQUEST", "hello")
    again = RawShard(stub, epoch=12)
    await again.register()
    await again.report()
    await again.send(report=rpb.BlockReport(last=True))
    assert await shard_failure(again) == ("INVALID_ARGUMENT", "INVALID_REQUEST", "report")


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (report({16: 1}), "report.blocks[0].indices[0]"),
        (rpb.BlockReport(publications=[publications([], hash_algorithm="md5")]), "hash_algorithm"),
        (rpb.BlockReport(publications=[publications([], token_ids=bytes(2**20))]), "token_ids"),
    ],
)
async def test_a_report_that_can_not_be_ends_the_stream(
    stub: Stub, part: rpb.BlockReport, field: str
) -> None:
    shard = RawShard(stub)
    await shard.register()
    await shard.send(report=part)
    code, reason, named = await shard_failure(shard)
    assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert named.endswith(field)
    assert not await is_ready(stub)


@pytest.mark.parametrize(
    "other",
    [
        replace(SCALED, model_id="other"),
        replace(SCALED, kv_dtype="float8_e5m2"),
        replace(SCALED, groups=(replace(SCALED.groups[0], key_scales=(0.5, 0.125)),)),
    ],
    ids=["model", "type", "scales"],
)
async def test_another_layout_is_not_let_into_a_pool(stub: Stub, other: Layout) -> None:
    first = RawShard(stub, shard=half(0), layout=SCALED.to_proto())
    await first.register()
    intruder = RawShard(stub, epoch=99, shard=half(1), layout=other.to_proto())
    await intruder.send(hello=intruder.hello)
    wanted = ("FAILED_PRECONDITION", "LAYOUT_MISMATCH", "hello.layout")
    assert await shard_failure(intruder) == wanted
    first.hang_up()


async def two_halves(stub: Stub, *num_blocks: int) -> list[RawShard]:
    """A pool of two shards, ready."""
    shards = [
        RawShard(stub, shard=half(i), epoch=50 + i, num_device_blocks=num)
        for i, num in enumerate(num_blocks or (16, 16))
    ]
    for shard in shards:
        assert not shard.hello.shard.index or not await is_ready(stub)
        await shard.register()
        await shard.report()
    assert await is_ready(stub)
    return shards


async def test_a_pool_is_ready_when_all_its_shards_have_come(stub: Stub) -> None:
    shards = await two_halves(stub, 16, 12)
    session = await RawSession.open(stub, shards[0])
    assert (await stub.GetPool(pool_pb2.GetPoolRequest(pool_id="pool"))).usage[0].num_blocks == 12
    assert [info.epoch for info in session.opened.shards] == [50, 51]
    # A plan has run when every shard says so.
    plan = (await session.admit(1, PROMPT)).plan
    for shard, num_written in zip(shards, (0, 20), strict=True):
        session.receipts = [shard.receipt(plan)]
        await session.submit()
        assert await session.num_written(1) == num_written
    for shard in shards:
        shard.hang_up()


async def test_a_shard_that_stays_when_another_restarts_fences_and_reports_again(
    stub: Stub,
) -> None:
    left, right = await two_halves(stub)
    session = await RawSession.open(stub, left)
    await session.admit(1, PROMPT)
    await leave(stub, right)
    successor = RawShard(stub, shard=half(1), epoch=60)
    assert (await successor.register()).key == left.key
    await successor.report()
    fence = (await left.receive()).fence
    assert (fence.session, fence.ordinal) == (session.ref, 1)
    assert (await left.receive()).HasField("report_request")
    assert not await is_ready(stub)
    await left.send(fence_done=rpb.FenceDone(session=fence.session))
    await left.report(report({0: 7}))
    assert await is_ready(stub)
    fresh = await RawSession.open(stub, left)
    assert fresh.ref.session_id != session.ref.session_id
    left.hang_up()
    successor.hang_up()


async def test_two_processes_that_claim_one_shard_do_not_take_it_by_turns(stub: Stub) -> None:
    newer = RawShard(stub, epoch=12)
    await newer.register()
    await newer.report()
    session = await RawSession.open(stub, newer)
    for _ in range(3):
        older = RawShard(stub, epoch=11)
        await older.send(hello=older.hello)
        wanted = ("ABORTED", "STALE_EPOCH", "hello.epoch")
        assert await shard_failure(older) == wanted
    assert await is_ready(stub)
    await session.admit(1, PROMPT)
    newer.hang_up()


async def test_what_is_published_is_sent_to_the_data_plane(
    session: RawSession, shard: RawShard
) -> None:
    await session.admit(1, PROMPT)
    await session.submit()
    told = await shard.published(2)
    first, second = columns.read(INT32, told.indices, "indices")
    assert list(columns.read(INT32, told.parent_indices, "parents")) == [-1, first]
    assert list(columns.read(INT64, told.generations, "generations")) == [1, 1]
    assert list(columns.read(INT64, told.parent_generations, "parents")) == [0, 1]
    assert told.token_ids == ops.pack_tokens(PROMPT[:16])
    assert (told.tenant, told.namespace, told.hash_algorithm) == ("default", "", "xxh3-128")
    assert len({told.hashes[:16], told.hashes[16:]}) == 2
    assert first != second


async def test_a_closed_session_is_fenced_and_its_blocks_return_when_that_is_done(
    stub: Stub, session: RawSession, shard: RawShard
) -> None:
    await session.admit(1, PROMPT)
    await stub.CloseSession(pb.CloseSessionRequest(session=session.ref))
    fence = (await shard.receive()).fence
    assert fence.session == session.ref
    counters = await counters_of(stub)
    assert counters["sessions"] == 0
    assert counters['blocks{state="retired",tier="device"}'] == 3
    await shard.send(fence_done=rpb.FenceDone(session=session.ref))

    async def all_free() -> bool:
        pool = await stub.GetPool(pool_pb2.GetPoolRequest(pool_id="pool"))
        return pool.usage[0].num_free_blocks == 16

    await until(all_free)


async def test_a_data_plane_is_told_at_once_and_not_at_the_next_tick(
    control_server: ControlPlaneServer, stub: Stub, session: RawSession, shard: RawShard
) -> None:
    control_server.ticks.cancel()
    await session.admit(1, PROMPT)
    await session.submit()
    await shard.published(2)
    await stub.CloseSession(pb.CloseSessionRequest(session=session.ref))
    assert (await shard.receive()).fence.session == session.ref


async def test_a_lease_that_is_not_renewed_ends_and_is_fenced(
    start_control_plane: Any, connect: Connect
) -> None:
    server = await start_control_plane(lease_s=1.5)
    stub = connect(server)
    shard = RawShard(stub)
    await shard.register()
    await shard.report()
    kept = await RawSession.open(stub, shard)
    lost = await RawSession.open(stub, shard)
    await lost.admit(1, PROMPT)
    for _ in range(10):
        await asyncio.sleep(0.2)
        await stub.RenewSession(pb.RenewSessionRequest(session=kept.ref))
    assert (await shard.receive()).fence.session == lost.ref
    await shard.send(fence_done=rpb.FenceDone(session=lost.ref))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await lost.admit(2, PROMPT)
    assert from_rpc_error(failure.value).reason == "SESSION_EXPIRED"
    counters = await counters_of(stub)
    assert counters["sessions"] == 1
    assert counters['blocks{state="held",tier="device"}'] == 0
    shard.hang_up()


async def test_a_broken_connection_is_resumed_by_the_same_process(
    stub: Stub, session: RawSession, shard: RawShard
) -> None:
    await session.admit(1, PROMPT)
    shard.hang_up()

    async def is_gone() -> bool:
        return not await is_ready(stub)

    await until(is_gone)
    again = shard.again(stub)
    welcome = await again.register()
    assert (welcome.resumed, welcome.key) == (True, b"")
    await until(lambda: is_ready(stub))
    await session.submit()
    await again.published(2)
    again.hang_up()


async def test_a_process_that_holds_another_key_is_not_resumed(
    stub: Stub, session: RawSession, shard: RawShard
) -> None:
    await leave(stub, shard)
    again = shard.again(stub)
    again.hello.key_id = bytes(16)
    welcome = await again.register()
    assert not welcome.resumed
    assert welcome.key not in (b"", shard.key)
    await again.report()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await session.admit(1, PROMPT)
    assert from_rpc_error(failure.value).reason == "STALE_EPOCH"
    again.hang_up()


async def test_what_was_not_sent_is_sent_after_a_reconnect(
    stub: Stub, session: RawSession, shard: RawShard
) -> None:
    await session.admit(1, PROMPT)
    shard.hang_up()

    async def is_gone() -> bool:
        return not await is_ready(stub)

    await until(is_gone)
    await stub.CloseSession(pb.CloseSessionRequest(session=session.ref))
    again = shard.again(stub)
    assert (await again.register()).resumed
    assert (await again.receive()).fence.session == session.ref
    again.hang_up()


async def test_a_new_stream_of_the_same_process_supersedes_the_old(
    stub: Stub, shard: RawShard
) -> None:
    second = shard.again(stub)
    assert (await second.register()).resumed
    assert (await shard_failure(shard))[:2] == ("CANCELLED", "CANCELLED")
    assert await is_ready(stub)
    second.hang_up()


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
    silent = RawShard(stub)
    await silent.register()
    await silent.report()
    await asyncio.sleep(0.7)
    successor = RawShard(stub, epoch=12)
    assert (await successor.register()).key != silent.key
    assert (await shard_failure(silent))[:2] == ("ABORTED", "STALE_EPOCH")
    successor.hang_up()


async def test_a_later_process_takes_the_shard_over_and_old_sessions_are_stale(
    stub: Stub, session: RawSession, shard: RawShard
) -> None:
    await session.admit(1, PROMPT)
    await leave(stub, shard)
    second = RawShard(stub, epoch=12)
    welcome = await second.register()
    assert not welcome.resumed
    assert welcome.key != shard.key
    await second.report()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await session.admit(2, PROMPT)
    assert failure.value.code() is grpc.StatusCode.ABORTED
    fresh = await RawSession.open(stub, second)
    assert (await fresh.admit(1, PROMPT)).results[0].admit.num_blocks == 3
    second.hang_up()


async def test_a_data_plane_is_not_gone_when_the_control_plane_was_held_up(
    start_control_plane: Any, connect: Connect
) -> None:
    server = await start_control_plane(heartbeat_s=0.2)
    shard = RawShard(connect(server))
    await shard.register()
    await shard.report()

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


async def test_a_new_control_plane_learns_the_prefixes_from_the_report(
    start_control_plane: Any, connect: Connect, session: RawSession, shard: RawShard
) -> None:
    await session.admit(1, PROMPT)
    await session.submit()
    told = await shard.published(2)
    successor = await start_control_plane()
    stub = connect(successor)
    moved = shard.again(stub)
    welcome = await moved.register()
    assert not welcome.resumed
    assert welcome.incarnation > shard.welcome.incarnation
    indices = columns.read(INT32, told.indices, "indices")
    generations = columns.read(INT64, told.generations, "generations")
    held = blocks(dict(zip(indices, generations, strict=True)))
    await moved.report(rpb.BlockReport(blocks=[held], publications=[told], last=True))
    fresh = await RawSession.open(stub, moved)
    admitted = await fresh.admit(1, PROMPT)
    assert admitted.results[0].admit.num_cached_tokens == 16
    changes = plan_pb2.Plan.FromString(admitted.plan.payload).changes
    assert changes.generations[:16] == told.generations
    assert changes.indices[:8] == told.indices
    moved.hang_up()


async def test_session_ids_are_not_given_twice_by_control_planes_of_one_incarnation(
    start_control_plane: Any, connect: Connect
) -> None:
    """An engine that closes its lost session must not close another's at the new one."""
    ids: list[int] = []
    for _ in range(2):
        stub = connect(await start_control_plane(incarnation=5))
        shard = RawShard(stub)
        await shard.register()
        await shard.report()
        sessions = [await RawSession.open(stub, shard) for _ in range(2)]
        grants = [plan_pb2.SessionGrant.FromString(s.opened.grant.payload) for s in sessions]
        assert [grant.ordinal for grant in grants] == [1, 2]
        ids += [session.ref.session_id for session in sessions]
        shard.hang_up()
    assert len(set(ids)) == 4
    assert all(0 < session_id < 2**53 for session_id in ids)
