"""Each call of the control plane answers what the core found, and refuses with a status that names
the reason and the field.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc.aio
import pytest
from control_wire import LAYOUT, RawSession, RawShard, Stub
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from control_plane.server.server import ControlPlaneServer
from kvplane import ops, protocol, signing
from kvplane.error_codec import from_rpc_error
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb

PROMPT = list(range(1, 21))  # 20 tokens: 3 blocks of 8, of which 2 are full


async def refused(call: Awaitable[Any], code: str, reason: str, field: str = "") -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    error = from_rpc_error(failure.value)
    told = (failure.value.code().name, error.reason, error.field)
    assert told == (code, reason, field), failure.value.details()


async def test_it_says_who_it_is(stub: Stub, control_server: ControlPlaneServer) -> None:
    answer = await stub.DescribeControlPlane(pb.DescribeControlPlaneRequest())
    assert answer.protocol == protocol.supported()
    assert answer.incarnation == control_server.core.incarnation > 0
    assert answer.version


async def test_it_lists_the_pools_that_have_registered(stub: Stub) -> None:
    assert list((await stub.ListPools(pb.ListPoolsRequest())).pool_ids) == []
    shards = [RawShard(stub, pool_id=name) for name in ("b", "a")]
    for shard in shards:
        await shard.register()
    assert list((await stub.ListPools(pb.ListPoolsRequest())).pool_ids) == ["a", "b"]
    for shard in shards:
        shard.hang_up()


async def test_it_describes_a_pool(stub: Stub, session: RawSession, shard: RawShard) -> None:
    await session.admit(1, PROMPT)
    pool = await stub.DescribePool(pb.DescribePoolRequest(pool_id="pool"))
    assert pool.layout == LAYOUT.to_proto()
    assert pool.ready
    assert (pool.num_sessions, pool.num_sequences) == (1, 1)
    assert [tier.num_blocks for tier in pool.usage.tiers] == [16, 8]
    assert pool.usage.tiers[0].num_held_blocks == 3
    assert pool.counters.num_lookup_tokens > 0
    [info] = pool.shards
    assert (info.epoch, info.address, info.connected) == (11, "127.0.0.1:1", True)
    assert info.shard == shard.hello.shard


async def test_it_refuses_pools_that_are_not_there(stub: Stub) -> None:
    describe, opening = pb.DescribePoolRequest, pb.OpenSessionRequest
    await refused(
        stub.DescribePool(describe(pool_id="x")), "NOT_FOUND", "POOL_NOT_FOUND", "pool_id"
    )
    await refused(stub.DescribePool(describe()), "INVALID_ARGUMENT", "INVALID_REQUEST", "pool_id")
    request = opening(pool_id="x", protocol=protocol.supported(), layout=LAYOUT.to_proto())
    await refused(stub.OpenSession(request), "NOT_FOUND", "POOL_NOT_FOUND", "pool_id")


async def test_a_session_is_opened_with_a_signed_grant(stub: Stub, shard: RawShard) -> None:
    session = await RawSession.open(stub, shard)
    opened = session.opened
    assert opened.protocol_version == 1
    assert opened.time_to_live.seconds == 30
    assert (opened.num_device_blocks, opened.num_host_blocks) == (16, 8)
    assert opened.layout == LAYOUT.to_proto()
    assert [info.address for info in opened.shards] == ["127.0.0.1:1"]
    sealed = opened.grant
    key = shard.welcome.key
    signing.verify(key, signing.GRANT, sealed.type, sealed.payload, sealed.signature, field="grant")
    grant = tpb.SessionGrant.FromString(sealed.payload)
    assert (grant.session_id, grant.pool_id) == (opened.session_id, "pool")
    assert (grant.tenant, list(grant.shard_epochs)) == ("default", [11])
    assert grant.incarnation == opened.incarnation
    assert (await RawSession.open(stub, shard)).id > session.id


@pytest.mark.parametrize(
    ("changes", "code", "reason", "field"),
    [
        ({"protocol": None}, "INVALID_ARGUMENT", "INVALID_REQUEST", "protocol"),
        (
            {"protocol": tpb.ProtocolRange(oldest=2, newest=9)},
            "FAILED_PRECONDITION",
            "PROTOCOL_MISMATCH",
            "protocol",
        ),
        ({"layout": None}, "INVALID_ARGUMENT", "INVALID_REQUEST", "layout.fingerprint"),
        (
            {"layout": tpb.Layout(fingerprint=bytes(32))},
            "FAILED_PRECONDITION",
            "LAYOUT_MISMATCH",
            "layout",
        ),
        ({"client_name": "x" * 129}, "INVALID_ARGUMENT", "INVALID_REQUEST", "client_name"),
        ({"pool_id": ""}, "INVALID_ARGUMENT", "INVALID_REQUEST", "pool_id"),
    ],
)
async def test_a_session_is_not_opened_when(
    stub: Stub, shard: RawShard, changes: dict[str, Any], code: str, reason: str, field: str
) -> None:
    fields = {"pool_id": "pool", "protocol": protocol.supported(), "layout": LAYOUT.to_proto()}
    request = pb.OpenSessionRequest(**{**fields, **changes})
    await refused(stub.OpenSession(request), code, reason, field)


async def test_a_pool_that_has_not_reported_is_not_ready_and_says_when_to_ask_again(
    stub: Stub,
) -> None:
    shard = RawShard(stub)
    await shard.register()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await RawSession.open(stub, shard)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    error = from_rpc_error(failure.value)
    assert error.reason == "POOL_NOT_READY"
    assert error.retry_delay_s is not None
    shard.hang_up()


async def test_an_error_carries_reason_domain_and_field_in_its_details(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.DescribePool(pb.DescribePoolRequest())
    status = rpc_status.from_call(failure.value)  # type: ignore[arg-type]
    assert status is not None
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "kvplane")
    assert info.metadata["field"] == "pool_id"
    assert status.details[1].Unpack(bad)
    assert bad.field_violations[0].field == "pool_id"


async def test_a_lease_is_renewed_and_a_session_closed_twice(
    stub: Stub, session: RawSession
) -> None:
    renewed = await stub.RenewSession(pb.RenewSessionRequest(session_id=session.id))
    assert renewed.time_to_live.seconds == 30
    await stub.CloseSession(pb.CloseSessionRequest(session_id=session.id))
    await stub.CloseSession(pb.CloseSessionRequest(session_id=session.id))
    call = stub.RenewSession(pb.RenewSessionRequest(session_id=session.id))
    await refused(call, "NOT_FOUND", "SESSION_NOT_FOUND", "session_id")


async def test_the_six_operations_are_unary_calls_too(stub: Stub, session: RawSession) -> None:
    admitted = session.ran(await session.admit(1, PROMPT, max_total_tokens=40))
    assert admitted.result == pb.AdmitResult(num_blocks=3, num_scheduled_tokens=20)
    plan = tpb.Plan.FromString(admitted.plan.payload)
    assert (plan.number, plan.previous, plan.session_id) == (1, 0, session.id)
    assert [(r.sequence_id, r.first_position, r.num_tokens) for r in plan.rows] == [(1, 0, 20)]

    operation = ops.append(1, [21], 1).append
    appended = await stub.Append(pb.AppendRequest(operation=operation, **session.next()))
    session.ran(appended)
    assert appended.result == pb.AppendResult(first_position=20, num_blocks=3)

    forked = await stub.Fork(pb.ForkRequest(operation=ops.fork(1, 2).fork, **session.next()))
    session.ran(forked)
    assert forked.result.num_blocks == 3

    both = ops.swap_out([1, 2]).swap_out
    gone = session.ran(await stub.SwapOut(pb.SwapOutRequest(operation=both, **session.next())))
    assert gone.result.num_blocks == 3
    assert len(tpb.Plan.FromString(gone.plan.payload).transfers) == 3
    await session.submit()

    back = ops.swap_in([1, 2]).swap_in
    returned = session.ran(await stub.SwapIn(pb.SwapInRequest(operation=back, **session.next())))
    assert returned.result.num_blocks == 3

    one = ops.free(1).free
    freed = session.ran(await stub.Free(pb.FreeRequest(operation=one, **session.next())))
    assert freed.result.num_released_blocks == 0
    two = ops.free(2).free
    freed = session.ran(await stub.Free(pb.FreeRequest(operation=two, **session.next())))
    assert freed.result.num_released_blocks == 3
    usage = (await session.submit()).usage
    assert usage.tiers[0].num_held_blocks == 0
    assert usage.tiers[0].num_cached_blocks == 2  # the full blocks stay to be found


async def test_a_published_prefix_is_found_again(stub: Stub, session: RawSession) -> None:
    lookup = pb.LookupPrefixRequest(session_id=session.id, token_ids=ops.pack_tokens(PROMPT))
    assert (await stub.LookupPrefix(lookup)).num_cached_tokens == 0
    session.ran(await session.admit(1, PROMPT))
    await session.submit()
    found = await stub.LookupPrefix(lookup)
    assert found.num_cached_tokens == 16
    assert [len(hash) for hash in found.hashes] == [16, 16]
    second = session.ran(await session.admit(2, PROMPT))
    assert second.result.num_cached_tokens == 16


async def test_a_table_and_a_sequence_can_be_looked_at(stub: Stub, session: RawSession) -> None:
    session.ran(await session.admit(5, PROMPT))
    name = {"session_id": session.id, "sequence_id": 5}
    table = await stub.GetBlockTable(pb.GetBlockTableRequest(**name))
    assert table.num_tokens == 20
    [blocks] = table.tables
    assert blocks.tier == tpb.TIER_DEVICE
    assert len(set(blocks.indices)) == 3
    assert all(generation >= 1 for generation in blocks.generations)
    before = (await stub.DescribeSequence(pb.DescribeSequenceRequest(**name))).sequence
    assert (before.num_tokens, before.num_scheduled_tokens, before.num_written_tokens) == (
        20,
        20,
        0,
    )
    await session.submit()
    after = (await stub.DescribeSequence(pb.DescribeSequenceRequest(**name))).sequence
    assert (after.num_written_tokens, after.num_blocks, after.tier) == (20, 3, tpb.TIER_DEVICE)
    name["sequence_id"] = 6
    for call in (
        stub.GetBlockTable(pb.GetBlockTableRequest(**name)),
        stub.DescribeSequence(pb.DescribeSequenceRequest(**name)),
    ):
        await refused(call, "NOT_FOUND", "SEQUENCE_NOT_FOUND", "sequence_id")


async def test_a_plan_that_has_not_run_can_be_given_up_and_one_that_has_can_not(
    stub: Stub, session: RawSession
) -> None:
    session.ran(await session.admit(1, PROMPT))
    abort = pb.AbortPlanRequest(session_id=session.id, plan_number=1)
    [state] = (await stub.AbortPlan(abort)).sequences
    assert (state.sequence_id, state.num_scheduled_tokens) == (1, 0)
    assert (await stub.AbortPlan(abort)).sequences == [state]
    session.receipts.clear()
    operation = ops.append(1, [], 20).append
    appended = await stub.Append(pb.AppendRequest(operation=operation, **session.next()))
    assert tpb.Plan.FromString(appended.plan.payload).resync
    session.ran(appended)
    await session.submit()
    done = pb.AbortPlanRequest(session_id=session.id, plan_number=2)
    await refused(stub.AbortPlan(done), "FAILED_PRECONDITION", "PLAN_RECEIPTED", "plan_number")


async def test_a_resync_answers_with_whole_tables_and_the_same_when_repeated(
    stub: Stub, session: RawSession
) -> None:
    session.ran(await session.admit(1, PROMPT))
    await session.submit()
    session.number += 1
    request = pb.ResyncRequest(session_id=session.id, number=session.number)
    answer = await stub.Resync(request)
    plan = tpb.Plan.FromString(answer.plan.payload)
    assert plan.resync
    assert [len(change.set.blocks.indices) for change in plan.changes] == [3]
    assert [state.num_written_tokens for state in answer.sequences] == [20]
    assert await stub.Resync(request) == answer


async def test_later_and_never_are_statuses_of_a_unary_call_and_use_up_no_number(
    stub: Stub, session: RawSession
) -> None:
    await session.admit(1, list(range(100)))  # 13 of 16 blocks

    def admit(num_tokens: int) -> Awaitable[Any]:
        operation = ops.admit(2, list(range(1000, 1000 + num_tokens))).admit
        return stub.Admit(pb.AdmitRequest(session_id=session.id, number=2, operation=operation))

    await refused(admit(40), "RESOURCE_EXHAUSTED", "POOL_FULL")
    await refused(admit(1000), "OUT_OF_RANGE", "NEVER_FITS")
    assert (await admit(8)).result.num_blocks == 1


async def test_a_unary_call_that_fails_names_its_own_field(stub: Stub, session: RawSession) -> None:
    missing = pb.FreeRequest(session_id=session.id, number=1)
    await refused(stub.Free(missing), "INVALID_ARGUMENT", "INVALID_REQUEST", "operation")
    missing.operation.sequence_id = 9
    wanted = ("NOT_FOUND", "SEQUENCE_NOT_FOUND", "operation.sequence_id")
    await refused(stub.Free(missing), *wanted)
    missing.number = 0
    await refused(stub.Free(missing), "INVALID_ARGUMENT", "INVALID_REQUEST", "number")
    empty = pb.AdmitRequest(session_id=session.id, number=1, operation=pb.Admit(sequence_id=1))
    wanted = ("INVALID_ARGUMENT", "INVALID_REQUEST", "operation.token_ids")
    await refused(stub.Admit(empty), *wanted)


async def test_a_repeated_number_gets_the_same_answer_and_another_content_a_conflict(
    stub: Stub, session: RawSession
) -> None:
    first = pb.AdmitRequest(session_id=session.id, number=1, operation=ops.admit(1, PROMPT).admit)
    answer = await stub.Admit(first)
    assert await stub.Admit(first) == answer
    other = pb.FreeRequest(session_id=session.id, number=1, operation=ops.free(1).free)
    await refused(stub.Free(other), "FAILED_PRECONDITION", "STEP_CONFLICT", "number")
    other.number = 5
    await refused(stub.Free(other), "FAILED_PRECONDITION", "STEP_OUT_OF_ORDER", "number")
    assert await stub.Admit(first) == answer


async def test_receipts_that_are_forged_are_refused_and_change_nothing(
    stub: Stub, session: RawSession
) -> None:
    plan = (await session.admit(1, PROMPT)).plan
    forged = session.shard.receipt(plan)
    forged.signature = bytes(32)
    request = pb.SubmitReceiptsRequest(session_id=session.id, receipts=[forged])
    call = stub.SubmitReceipts(request)
    await refused(call, "DATA_LOSS", "BAD_SIGNATURE", "receipts[0].signature")
    name = pb.DescribeSequenceRequest(session_id=session.id, sequence_id=1)
    assert (await stub.DescribeSequence(name)).sequence.num_written_tokens == 0


async def test_receipts_may_come_twice(stub: Stub, session: RawSession) -> None:
    receipt = session.shard.receipt((await session.admit(1, PROMPT)).plan)
    request = pb.SubmitReceiptsRequest(session_id=session.id, receipts=[receipt, receipt])
    first = await stub.SubmitReceipts(request)
    assert await stub.SubmitReceipts(request) == first


async def test_sessions_of_others_do_not_exist(stub: Stub, session: RawSession) -> None:
    name = {"session_id": session.id + 1}
    calls = [
        stub.RenewSession(pb.RenewSessionRequest(**name)),
        stub.SubmitReceipts(pb.SubmitReceiptsRequest(**name)),
        stub.AbortPlan(pb.AbortPlanRequest(plan_number=1, **name)),
        stub.Resync(pb.ResyncRequest(number=1, **name)),
        stub.GetBlockTable(pb.GetBlockTableRequest(sequence_id=1, **name)),
        stub.LookupPrefix(pb.LookupPrefixRequest(token_ids=b"abcd", **name)),
        stub.DescribeSequence(pb.DescribeSequenceRequest(sequence_id=1, **name)),
        stub.Free(pb.FreeRequest(number=1, operation=ops.free(1).free, **name)),
    ]
    for call in calls:
        await refused(call, "NOT_FOUND", "SESSION_NOT_FOUND", "session_id")
