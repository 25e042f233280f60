"""A data plane's connection: what it is told and asked, who may follow whom, and what a lost one
brings about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from control_wire import PATIENCE_S, RawSession, RawShard, Stub

from control_plane.server.server import ControlPlaneServer
from kvplane import ops
from kvplane.error_codec import from_rpc_error
from kvplane.layout import LayerGroup, Layout
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb

PROMPT = list(range(1, 21))
WHOLE = {"num_shards": 1, "num_layers": 2, "num_kv_heads": 2}
SCALED = Layout(
    "m", 8, "float32", "float8_e4m3fn", (LayerGroup("full", (0, 1), 2, 8, key_scales=(0.5, 0.25)),)
)

Connect = Callable[[ControlPlaneServer], Stub]


async def shard_failure(shard: RawShard) -> tuple[str, str, str]:
    failure = await shard.failure()
    error = from_rpc_error(failure)
    return failure.code().name, error.reason, error.field


async def is_ready(stub: Stub) -> bool:
    return (await stub.DescribePool(pb.DescribePoolRequest(pool_id="pool"))).ready


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
    assert (welcome.protocol_version, welcome.resumed) == (1, False)
    assert welcome.incarnation == control_server.core.incarnation
    assert len(welcome.key) == 32
    assert welcome.heartbeat_interval.seconds == 5
    await shard.report(last=False)
    assert not await is_ready(stub)
    await shard.report(last=True, max_session_id=41)
    assert await is_ready(stub)
    assert (await RawSession.open(stub, shard)).id > 41
    shard.hang_up()


@pytest.mark.parametrize(
    ("hello", "code", "reason", "field"),
    [
        ({"protocol": None}, "INVALID_ARGUMENT", "INVALID_REQUEST", "hello.protocol"),
        (
            {"protocol": tpb.ProtocolRange(oldest=7, newest=8)},
            "FAILED_PRECONDITION",
            "PROTOCOL_MISMATCH",
            "hello.protocol",
        ),
        ({"pool_id": ""}, "INVALID_ARGUMENT", "INVALID_REQUEST", "hello.pool_id"),
        ({"layout": tpb.Layout()}, "INVALID_ARGUMENT", "INVALID_REQUEST", "hello.layout.dtype"),
        (
            {"num_device_blocks": 0},
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "hello.num_device_blocks",
        ),
        (
            {"num_device_blocks": -(2**63)},
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "hello.num_device_blocks",
        ),
        (
            {"num_host_blocks": -1},
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "hello.num_host_blocks",
        ),
        ({"epoch": 0}, "INVALID_ARGUMENT", "INVALID_REQUEST", "hello.epoch"),
        ({"address": ""}, "INVALID_ARGUMENT", "INVALID_REQUEST", "hello.address"),
        ({"address": "h" * 513}, "INVALID_ARGUMENT", "INVALID_REQUEST", "hello.address"),
        (
            {"shard": tpb.Shard(index=1, num_shards=1, num_layers=2, num_kv_heads=2)},
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "hello.shard.index",
        ),
        *(
            (
                {"shard": tpb.Shard(**{**WHOLE, field: value})},
                "INVALID_ARGUMENT",
                "INVALID_REQUEST",
                f"hello.shard.{field}",
            )
            for field, value in [
                ("first_layer", 2),
                ("first_layer", -1),
                ("num_layers", 0),
                ("num_layers", 2**31 - 1),
                ("first_kv_head", -(2**31)),
                ("num_kv_heads", 3),
            ]
        ),
        (
            {"incarnation": 2**64 - 1},
            "FAILED_PRECONDITION",
            "STALE_INCARNATION",
            "hello.incarnation",
        ),
    ],
)
async def test_a_hello_is_refused_when(
    stub: Stub, hello: dict[str, Any], code: str, reason: str, field: str
) -> None:
    shard = RawShard(stub, **hello)
    await shard.send(hello=shard.hello)
    assert await shard_failure(shard) == (code, reason, field)
    assert list((await stub.ListPools(pb.ListPoolsRequest())).pool_ids) == []


async def test_messages_out_of_turn_end_the_stream(stub: Stub) -> None:
    early = RawShard(stub)
    await early.send(heartbeat=pb.Heartbeat())
    assert await shard_failure(early) == ("INVALID_ARGUMENT", "INVALID_REQUEST", "hello")
    twice = RawShard(stub)
    await twice.register()
    await twice.send(hello=twice.hello)
    assert await shard_failure(twice) == ("INVALID_ARGUMENT", "INVALID_REQUEST", "hello")
    again = RawShard(stub, epoch=12)
    await again.register()
    await again.report()
    await again.send(report=pb.BlockReport(last=True))
    assert await shard_failure(again) == ("INVALID_ARGUMENT", "INVALID_REQUEST", "report")


@pytest.mark.parametrize(
    "block",
    [
        pb.ReportedBlock(block=tpb.BlockRef(tier=tpb.TIER_DEVICE, index=16, generation=1)),
        pb.ReportedBlock(block=tpb.BlockRef(tier=tpb.TIER_DEVICE, index=-1, generation=1)),
        pb.ReportedBlock(block=tpb.BlockRef(tier=tpb.TIER_HOST, index=2**62, generation=1)),
        pb.ReportedBlock(block=tpb.BlockRef(tier=tpb.TIER_DEVICE, index=1, generation=-1)),
        pb.ReportedBlock(block=tpb.BlockRef(tier=tpb.TIER_HOST, index=1, generation=2**62 + 1)),
        pb.ReportedBlock(block=tpb.BlockRef(tier=9, index=1, generation=1)),
    ],
)
async def test_a_report_of_blocks_that_can_not_be_is_refused(
    stub: Stub, block: pb.ReportedBlock
) -> None:
    shard = RawShard(stub)
    await shard.register()
    await shard.report(block, last=False)
    code, reason, field = await shard_failure(shard)
    assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert field.startswith("report.blocks")


@pytest.mark.parametrize("max_session_id", [-1, 2**62 + 1, 2**63 - 1])
async def test_a_report_of_sessions_that_leave_no_ids_to_give_is_refused(
    stub: Stub, max_session_id: int
) -> None:
    shard = RawShard(stub)
    await shard.register()
    await shard.send(report=pb.BlockReport(last=True, max_session_id=max_session_id))
    want = ("INVALID_ARGUMENT", "INVALID_REQUEST", "report.max_session_id")
    assert await shard_failure(shard) == want


async def test_the_highest_names_that_may_be_reported_leave_room_for_more(stub: Stub) -> None:
    shard = RawShard(stub, num_device_blocks=3)
    await shard.register()
    highest = [
        pb.ReportedBlock(block=tpb.BlockRef(tier=tpb.TIER_DEVICE, index=i, generation=2**62))
        for i in range(3)
    ]
    await shard.report(*highest, max_session_id=2**62)
    session = await RawSession.open(stub, shard)
    assert session.id == 2**62 + 1
    assert (await session.admit(1, PROMPT[:9])).HasField("plan")


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
    parts = [tpb.Shard(index=i, num_shards=2, num_layers=2, num_kv_heads=1) for i in range(2)]
    first = RawShard(stub, shard=parts[0], layout=SCALED.to_proto())
    await first.register()
    intruder = RawShard(stub, epoch=99, shard=parts[1], layout=other.to_proto())
    await intruder.send(hello=intruder.hello)
    wanted = ("FAILED_PRECONDITION", "LAYOUT_MISMATCH", "hello.layout")
    assert await shard_failure(intruder) == wanted
    first.hang_up()


async def test_a_pool_is_ready_when_all_its_shards_have_come(stub: Stub) -> None:
    parts = [
        tpb.Shard(index=i, num_shards=2, num_layers=2, first_kv_head=i, num_kv_heads=1)
        for i in range(2)
    ]
    sizes = [16, 12]
    shards = [
        RawShard(stub, shard=part, epoch=50 + part.index, num_device_blocks=size)
        for part, size in zip(parts, sizes, strict=True)
    ]
    await shards[0].register()
    await shards[0].report()
    assert not await is_ready(stub)
    await shards[1].register()
    await shards[1].report()
    assert await is_ready(stub)
    session = await RawSession.open(stub, shards[0])
    assert session.opened.num_device_blocks == 12
    assert [info.epoch for info in session.opened.shards] == [50, 51]
    # A plan has run when every shard says so.
    plan = (await session.admit(1, PROMPT)).plan
    name = pb.DescribeSequenceRequest(session_id=session.id, sequence_id=1)
    for shard, num_written in zip(shards, (0, 20), strict=True):
        session.receipts = [shard.receipt(plan)]
        await session.submit()
        assert (await stub.DescribeSequence(name)).sequence.num_written_tokens == num_written
    for shard in shards:
        shard.hang_up()


async def test_what_is_published_is_told_to_the_data_plane(
    session: RawSession, shard: RawShard
) -> None:
    session.ran(await session.admit(1, PROMPT))
    await session.submit()
    publications = list((await shard.receive()).publish.publications)
    while len(publications) < 2:
        publications += (await shard.receive()).publish.publications
    first, second = publications
    assert (first.parent_hash, second.parent_hash) == (b"", first.hash)
    assert first.token_ids == ops.pack_tokens(PROMPT[:8])
    assert second.token_ids == ops.pack_tokens(PROMPT[8:16])
    assert (first.tenant, first.block.tier) == ("default", tpb.TIER_DEVICE)


async def test_a_closed_session_is_fenced_and_its_blocks_return_when_that_is_done(
    stub: Stub, session: RawSession, shard: RawShard
) -> None:
    await session.admit(1, PROMPT)
    await stub.CloseSession(pb.CloseSessionRequest(session_id=session.id))
    fence = (await shard.receive()).fence
    assert fence.session_id == session.id
    pool = await stub.DescribePool(pb.DescribePoolRequest(pool_id="pool"))
    assert (pool.num_sessions, pool.usage.tiers[0].num_limbo_blocks) == (0, 3)
    await shard.send(fence_done=pb.FenceDone(session_id=session.id))

    async def all_free() -> bool:
        pool = await stub.DescribePool(pb.DescribePoolRequest(pool_id="pool"))
        return pool.usage.tiers[0].num_free_blocks == 16

    await until(all_free)


async def test_a_data_plane_is_told_at_once_and_not_at_the_next_tick(
    control_server: ControlPlaneServer, stub: Stub, session: RawSession, shard: RawShard
) -> None:
    control_server.ticks.cancel()
    session.ran(await session.admit(1, PROMPT))
    await session.submit()
    assert (await shard.receive()).publish.publications
    await stub.CloseSession(pb.CloseSessionRequest(session_id=session.id))
    assert (await shard.receive()).fence.session_id == session.id


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
        await stub.RenewSession(pb.RenewSessionRequest(session_id=kept.id))
    assert (await shard.receive()).fence.session_id == lost.id
    await shard.send(fence_done=pb.FenceDone(session_id=lost.id))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await lost.admit(2, PROMPT)
    assert from_rpc_error(failure.value).reason == "SESSION_EXPIRED"
    pool = await stub.DescribePool(pb.DescribePoolRequest(pool_id="pool"))
    assert (pool.num_sessions, pool.usage.tiers[0].num_held_blocks) == (1, 0)
    shard.hang_up()


async def test_a_broken_connection_is_resumed_by_the_same_process(
    stub: Stub, session: RawSession, shard: RawShard
) -> None:
    plan = session.ran(await session.admit(1, PROMPT)).plan
    shard.hang_up()

    async def is_gone() -> bool:
        return not await is_ready(stub)

    await until(is_gone)
    again = RawShard(stub, incarnation=shard.welcome.incarnation)
    welcome = await again.register()
    assert welcome.resumed
    assert welcome.key == shard.welcome.key
    await until(lambda: is_ready(stub))
    assert session.shard.receipt(plan) == session.receipts[0]
    await session.submit()
    assert (await again.receive()).publish.publications
    again.hang_up()


async def test_what_was_not_heard_is_told_again_after_a_reconnect(
    stub: Stub, session: RawSession, shard: RawShard
) -> None:
    await session.admit(1, PROMPT)
    shard.hang_up()

    async def is_gone() -> bool:
        return not await is_ready(stub)

    await until(is_gone)
    await stub.CloseSession(pb.CloseSessionRequest(session_id=session.id))
    again = RawShard(stub, incarnation=shard.welcome.incarnation)
    assert (await again.register()).resumed
    assert (await again.receive()).fence.session_id == session.id
    again.hang_up()


async def test_a_new_stream_of_the_same_process_supersedes_the_old(
    stub: Stub, shard: RawShard
) -> None:
    second = RawShard(stub, incarnation=shard.welcome.incarnation)
    assert (await second.register()).resumed
    assert (await shard_failure(shard))[:2] == ("CANCELLED", "CANCELLED")
    assert await is_ready(stub)
    second.hang_up()


async def test_a_new_process_takes_the_shard_over_and_old_sessions_are_stale(
    stub: Stub, session: RawSession, shard: RawShard
) -> None:
    await session.admit(1, PROMPT)
    second = RawShard(stub, epoch=12)
    welcome = await second.register()
    assert not welcome.resumed
    assert welcome.key != shard.welcome.key
    assert (await shard_failure(shard))[:2] == ("FAILED_PRECONDITION", "STALE_EPOCH")
    await second.report()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await session.admit(2, PROMPT)
    assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    fresh = await RawSession.open(stub, second)
    assert fresh.id > session.id
    assert (await fresh.admit(1, PROMPT)).result.num_blocks == 3
    second.hang_up()


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
        await shard.send(heartbeat=pb.Heartbeat())
    assert await is_ready(stub)
    assert (await shard_failure(shard))[:2] == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    assert not await is_ready(stub)


async def test_a_new_control_plane_learns_the_prefixes_from_the_report(
    start_control_plane: Any, connect: Connect, session: RawSession, shard: RawShard
) -> None:
    session.ran(await session.admit(1, PROMPT))
    await session.submit()
    publications = list((await shard.receive()).publish.publications)
    while len(publications) < 2:
        publications += (await shard.receive()).publish.publications
    successor = await start_control_plane()
    stub = connect(successor)
    moved = RawShard(stub, incarnation=shard.welcome.incarnation)
    welcome = await moved.register()
    assert not welcome.resumed
    assert welcome.incarnation > shard.welcome.incarnation
    blocks = [pb.ReportedBlock(block=p.block, publication=p) for p in publications]
    await moved.report(*blocks, max_session_id=session.id)
    fresh = await RawSession.open(stub, moved)
    assert fresh.id > session.id
    admitted = await fresh.admit(1, PROMPT)
    assert admitted.result.num_cached_tokens == 16
    plan = tpb.Plan.FromString(admitted.plan.payload)
    generations = list(plan.changes[0].set.blocks.generations)
    assert generations[:2] == [p.block.generation for p in publications]
    moved.hang_up()
