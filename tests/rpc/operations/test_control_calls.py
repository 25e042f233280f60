"""Each call of the control plane but the steps: pools and sessions, their lists in pages, and the
status of a refusal.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc.aio
import pytest

from control_plane import queries
from control_plane.server.server import ControlPlaneServer
from kvplane import ControlClient, ops
from kvplane.errors import QuotaExceededError
from kvplane.release import release
from kvplane.results import SequenceState
from kvplane.serving.requests import Requests
from kvplane.v1 import session_pb2
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.encodings import ENCODINGS, encode
from tests.helpers.planning.control_wire import RawSession, RawShard, Stub
from tests.helpers.planning.operations_world import BLOCK, POOL, prompt
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


async def test_it_says_who_it_is_and_lists_pools_and_sessions_in_pages(
    stub: Stub,
    control_server: ControlPlaneServer,
    shard: RawShard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = await stub.GetServerInfo(pool_pb2.GetServerInfoRequest())
    assert info.incarnation == control_server.core.incarnation > 0
    assert info == pool_pb2.GetServerInfoResponse(version=release(), incarnation=info.incarnation)
    monkeypatch.setattr(queries, "MAX_PAGE_SIZE", 2)
    others = [RawShard(stub, pool_id=name) for name in ("q", "b", "r", "a")]
    for other in others:
        await other.register()
    opened = [(await RawSession.open(stub, shard)).ref.session_id for _ in range(5)]
    async with ControlClient(control_server.address) as client:
        assert await client.list_pools() == ["a", "b", "pool", "q", "r"]
        listed = await client.list_sessions("pool")
    assert [each.session_id for each in listed] == sorted(opened)
    for other in others:
        other.hang_up()


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
    opening = pb.OpenSessionRequest(pool_id="pool", layout=tpb.Layout(fingerprint=bytes(32)))
    wanted = ("FAILED_PRECONDITION", "LAYOUT_MISMATCH", "layout")
    await refused(stub.OpenSession(opening), *wanted)


# Sessions.


async def test_a_session_is_shown_as_it_is_and_its_lease_is_not_renewed(
    stub: Stub, shard: RawShard
) -> None:
    session = await RawSession.open(stub, shard, namespace="lora-7")
    await session.admit(3, PROMPT)
    request = pool_pb2.ListSessionsRequest(pool_id="pool")
    [shown] = (await stub.ListSessions(request)).sessions
    assert (shown.session, shown.client_name, shown.namespace) == (session.ref, "test", "lora-7")
    assert (shown.num_sequences, shown.num_held_blocks, shown.num_plans_in_flight) == (1, 3, 1)
    assert shown.last_number == session.number == 1
    await session.look_at(3)
    await stub.Step(pb.StepRequest(session=session.ref, validate_only=True))
    [again] = (await stub.ListSessions(request)).sessions
    assert again.time_to_live.ToNanoseconds() < shown.time_to_live.ToNanoseconds()


async def test_sequences_come_in_pages(stub: Stub, shard: RawShard) -> None:
    session = await RawSession.open(stub, shard)
    await session.step(ops.admit(7, range(9), fork_sequence_ids=[5, 3]))
    request = pb.ListSequencesRequest(session=session.ref, page_size=2)
    first = await stub.ListSequences(request)
    request.page_token = first.next_page_token
    last = await stub.ListSequences(request)
    listed = [SequenceState.all_from_proto(page.sequences) for page in (first, last)]
    assert [[state.sequence_id for state in page] for page in listed] == [[3, 5], [7]]
    assert not last.next_page_token
    other = await RawSession.open(stub, shard)
    request.session.CopyFrom(other.ref)
    await refused(stub.ListSequences(request), *INVALID, "page_token")


async def test_a_table_and_a_sequence_can_be_looked_at(stub: Stub, session: RawSession) -> None:
    await session.admit(5, PROMPT)
    [held] = (await session.look_at(5, with_tables=True)).tables
    assert held.tier == tpb.TIER_DEVICE
    assert len(set(columns.read(INT32, held.indices, "indices"))) == 3
    assert list(columns.read(INT64, held.generations, "generations")) == [1, 1, 1]
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


async def test_every_encoding_of_a_step_is_the_same_step(
    control_server: ControlPlaneServer, session: RawSession
) -> None:
    """A repeat in another encoding is known by its content."""
    admit = session_pb2.Admit(sequence_id=1, token_ids=PROMPT, fork_sequence_ids=[2])
    step = session_pb2.StepRequest(number=1, operations=[session_pb2.Operation(admit=admit)])
    step.session.MergeFromString(session.ref.SerializeToString())
    async with grpc.aio.insecure_channel(control_server.address) as channel:
        send: Any = channel.unary_unary("/kvplane.v1.SessionService/Step")
        answer = await send(encode(step, "unpacked"))
        (result,) = pb.StepResponse.FromString(answer).results
        assert result.admit.num_blocks == 3
        for other in ENCODINGS:
            assert await send(encode(step, other)) == answer
        assert await send(step.SerializeToString()) == answer


# Sizes.


async def test_a_message_over_the_limit_uses_no_number_and_changes_nothing(world, caller) -> None:
    """Of the default limit: gRPC refuses it unread, so no field of it is named."""
    await caller.admit(1, prompt(1))
    assert await caller.num_cached(range(2_000_000)) == BLOCK  # 8 MB; gRPC's own default is 4 MiB
    before, (listed,) = world.state(), await world.client.list_sessions(POOL)
    with pytest.raises(
        QuotaExceededError,
        match=r"larger than max .*: send it in parts, or raise .* --max-message-bytes",
    ):
        await caller.session.step([ops.admit(2, bytes(40_000_000))])
    (again,) = await world.client.list_sessions(POOL)
    assert again.last_number == listed.last_number
    assert world.state() == before
    await caller.grow(1, 5)
