"""Each call of the control plane but the steps: pools and sessions. Each refusal has a status that
names the reason and the field.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from control_plane.server.server import ControlPlaneServer
from kvplane import ops
from kvplane.errors import QuotaExceededError
from kvplane.release import release
from kvplane.serving.requests import Requests
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.control_wire import RawSession, RawShard, Stub
from tests.helpers.planning.registration_messages import LAYOUT

PROMPT = list(range(1, 21))  # 20 tokens: 3 blocks of 8, of which 2 are full
INVALID = ("INVALID_ARGUMENT", "INVALID_REQUEST")
NO_POOL = ("NOT_FOUND", "POOL_NOT_FOUND")


async def refused(
    call: Awaitable[Any], code: str, reason: str, field: str = "", next_number: int = 0
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    error = from_rpc_error(failure.value)
    told = (failure.value.code().name, error.reason, error.field)
    assert told == (code, reason, field), failure.value.details()
    assert error.next_number == next_number


# Pools.


async def test_it_says_who_it_is_and_which_pools_have_registered(
    stub: Stub, control_server: ControlPlaneServer
) -> None:
    info = await stub.GetServerInfo(pool_pb2.GetServerInfoRequest())
    assert info.incarnation == control_server.core.incarnation > 0
    assert info == pool_pb2.GetServerInfoResponse(version=release(), incarnation=info.incarnation)
    assert list((await stub.ListPools(pool_pb2.ListPoolsRequest())).pool_ids) == []
    shards = [RawShard(stub, pool_id=name) for name in ("b", "a")]
    for shard in shards:
        await shard.register()
    assert list((await stub.ListPools(pool_pb2.ListPoolsRequest())).pool_ids) == ["a", "b"]
    for shard in shards:
        shard.hang_up()


async def test_it_describes_a_pool(stub: Stub, session: RawSession, shard: RawShard) -> None:
    await session.admit(1, PROMPT)
    pool = await stub.GetPool(pool_pb2.GetPoolRequest(pool_id="pool"))
    assert pool.layout == LAYOUT.to_proto()
    assert pool.ready
    assert [tier.num_blocks for tier in pool.usage] == [16, 8]
    assert pool.usage[0].num_held_blocks == 3
    [info] = pool.shards
    assert (info.epoch, info.address, info.connected) == (11, "127.0.0.1:1", True)
    assert info.shard == shard.hello.shard


async def test_it_refuses_pools_that_are_not_there(stub: Stub, shard: RawShard) -> None:
    opening = pb.OpenSessionRequest(pool_id="x", layout=LAYOUT.to_proto())
    find = ppb.FindPrefixRequest(token_ids=bytes(4), pool_ids=["pool", "x"])
    await refused(stub.GetPool(pool_pb2.GetPoolRequest(pool_id="x")), *NO_POOL, "pool_id")
    await refused(stub.GetPool(pool_pb2.GetPoolRequest()), *INVALID, "pool_id")
    await refused(stub.ListSessions(pool_pb2.ListSessionsRequest(pool_id="x")), *NO_POOL, "pool_id")
    watch = stub.WatchPrefixes(ppb.WatchPrefixesRequest(pool_id="x"))
    await refused(watch.read(), *NO_POOL, "pool_id")
    await refused(stub.OpenSession(opening), *NO_POOL, "pool_id")
    await refused(stub.FindPrefix(find), *NO_POOL, "pool_ids[1]")


async def test_an_error_carries_reason_domain_and_field_in_its_details(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.GetPool(pool_pb2.GetPoolRequest())
    status = rpc_status.from_call(failure.value)  # type: ignore[arg-type]
    assert status is not None
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "kvplane")
    assert info.metadata["field"] == "pool_id"
    assert status.details[1].Unpack(bad)
    assert bad.field_violations[0].field == "pool_id"


# Sessions.


async def test_a_session_is_opened_with_a_signed_grant(stub: Stub, shard: RawShard) -> None:
    opened = (await RawSession.open(stub, shard)).opened
    assert opened.time_to_live.seconds == 30
    sealed = opened.grant
    key = shard.welcome.key
    signing.verify(key, signing.GRANT, sealed.type, sealed.payload, sealed.signature, field="grant")
    grant = plan_pb2.SessionGrant.FromString(sealed.payload)
    assert (grant.session, grant.pool_id) == (opened.session, "pool")
    assert grant.max_plans_in_flight == opened.max_plans_in_flight
    assert (await RawSession.open(stub, shard)).ref.session_id != opened.session.session_id


@pytest.mark.parametrize(
    ("changes", "code", "reason", "field"),
    [
        ({"layout": None}, *INVALID, "layout.fingerprint"),
        (
            {"layout": tpb.Layout(fingerprint=bytes(32))},
            *("FAILED_PRECONDITION", "LAYOUT_MISMATCH", "layout"),
        ),
        (
            {"layout": replace(LAYOUT, model_id="other").to_proto()},
            *("FAILED_PRECONDITION", "LAYOUT_MISMATCH", "layout"),
        ),
        ({"layout": tpb.Layout(groups=LAYOUT.to_proto().groups)}, *INVALID, "layout.dtype"),
        ({"namespace": "x" * 129}, *INVALID, "namespace"),
        ({"client_name": "x" * 129}, *INVALID, "client_name"),
        ({"pool_id": ""}, *INVALID, "pool_id"),
    ],
)
async def test_a_session_is_not_opened_when(
    stub: Stub, shard: RawShard, changes: dict[str, Any], code: str, reason: str, field: str
) -> None:
    fields = {"pool_id": "pool", "layout": LAYOUT.to_proto()}
    request = pb.OpenSessionRequest(**{**fields, **changes})
    await refused(stub.OpenSession(request), code, reason, field)


async def test_a_lease_is_renewed_and_a_session_closed_twice(
    stub: Stub, session: RawSession
) -> None:
    renewed = await stub.RenewSession(pb.RenewSessionRequest(session=session.ref))
    assert renewed.time_to_live.seconds == 30
    await stub.CloseSession(pb.CloseSessionRequest(session=session.ref))
    await stub.CloseSession(pb.CloseSessionRequest(session=session.ref))
    call = stub.RenewSession(pb.RenewSessionRequest(session=session.ref))
    await refused(call, "NOT_FOUND", "SESSION_NOT_FOUND", "session.session_id")


async def test_requests_name_the_incarnation_and_sessions_of_others_do_not_exist(
    stub: Stub, session: RawSession
) -> None:
    ref = session.ref
    unknown = tpb.SessionRef(incarnation=ref.incarnation, session_id=ref.session_id ^ 1)
    other = tpb.SessionRef(incarnation=ref.incarnation - 1, session_id=ref.session_id)
    step = pb.StepRequest(number=1, operations=[ops.admit(1, PROMPT)])
    calls: list[tuple[Any, Any]] = [
        (stub.RenewSession, pb.RenewSessionRequest()),
        (stub.AbortPlans, pb.AbortPlansRequest(number=1, plan_number=1)),
        (stub.Step, pb.StepRequest(operations=step.operations, validate_only=True)),
        (stub.ListSequences, pb.ListSequencesRequest()),
        (stub.Step, step),
    ]
    for method, request in calls:
        request.session.CopyFrom(unknown)
        await refused(method(request), "NOT_FOUND", "SESSION_NOT_FOUND", "session.session_id")
        request.session.CopyFrom(other)
        wanted = ("ABORTED", "STALE_INCARNATION", "session.incarnation")
        await refused(method(request), *wanted)
    await refused(
        stub.CloseSession(pb.CloseSessionRequest(session=other)),
        *("ABORTED", "STALE_INCARNATION", "session.incarnation"),
    )
    await session.admit(1, PROMPT)  # its number was not used up


async def test_a_table_and_a_sequence_can_be_looked_at(stub: Stub, session: RawSession) -> None:
    await session.admit(5, PROMPT)
    [held] = (await session.look_at(5, with_tables=True)).tables
    assert held.tier == tpb.TIER_DEVICE
    assert len(set(columns.read(INT32, held.indices, "indices"))) == 3
    assert list(columns.read(INT64, held.generations, "generations")) == [1, 1, 1]
    assert await session.num_written(5) == 0
    await session.submit()
    assert (await session.look_at(5)).sequences == pb.SequenceStates(
        sequence_ids=columns.pack(INT64, [5]),
        admitted_by=columns.pack(INT64, [1]),
        num_tokens=columns.pack(INT32, [20]),
        num_scheduled_tokens=columns.pack(INT32, [20]),
        num_written_tokens=columns.pack(INT32, [20]),
        num_cached_tokens=columns.pack(INT32, [0]),
        num_blocks=columns.pack(INT32, [3]),
        tiers=columns.pack(UINT8, [tpb.TIER_DEVICE]),
    )
    for sequence_ids, with_tables, *wanted in (
        ([5, 6], False, "NOT_FOUND", "SEQUENCE_NOT_FOUND", "sequence_ids[1]"),
        ([5, 5], False, "INVALID_ARGUMENT", "INVALID_REQUEST", "sequence_ids"),
        ([5] * 1001, False, "INVALID_ARGUMENT", "INVALID_REQUEST", "sequence_ids"),
        ([], True, "INVALID_ARGUMENT", "INVALID_REQUEST", "sequence_ids"),
    ):
        request = pb.ListSequencesRequest(
            session=session.ref,
            sequence_ids=columns.pack(INT64, sequence_ids),
            with_tables=with_tables,
        )
        await refused(stub.ListSequences(request), *wanted)


# Numbers.


async def test_an_answer_that_is_not_sent_has_used_its_number(
    stub: Stub, session: RawSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(requests: Requests, num_bytes: int) -> None:
        raise QuotaExceededError("too many answers wait to be read")

    step = pb.StepRequest(session=session.ref, number=1, operations=[ops.admit(1, PROMPT)])
    with monkeypatch.context() as patch:
        patch.setattr(Requests, "hold_answer", full)
        await refused(stub.Step(step), "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", next_number=2)
    assert (await stub.Step(step)).HasField("plan"), "its answer is given again"
    renew = pb.RenewSessionRequest(session=session.ref)
    with monkeypatch.context() as patch:
        patch.setattr(Requests, "hold_answer", full)
        await refused(stub.RenewSession(renew), "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
