"""The service about pools: lists in pages, counters by the names of the metrics, sessions."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane import pages
from control_plane.server.server import ControlPlaneServer
from kvplane import ControlClient, ops
from kvplane.errors import InvalidRequestError
from kvplane.results import SequenceState, total_of
from kvplane.transport.connection import typed_errors
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.planning.control_wire import RawSession, RawShard, Stub
from tests.rpc.operations.test_control_calls import refused

LISTS: dict[str, Any] = {
    "ListPools": pool_pb2.ListPoolsRequest(),
    "ListSessions": pool_pb2.ListSessionsRequest(pool_id="pool"),
}


async def registered(stub: Stub, *pool_ids: str) -> list[RawShard]:
    shards = [RawShard(stub, pool_id=pool_id) for pool_id in pool_ids]
    for shard in shards:
        await shard.register()
    return shards


@pytest.mark.parametrize("method", LISTS)
@pytest.mark.parametrize(
    ("field", "value"), [("page_size", -1), ("page_size", 1001), ("page_token", "of mine")]
)
async def test_pages_that_cannot_be_are_refused(
    stub: Stub, shard: RawShard, method: str, field: str, value: Any
) -> None:
    request = type(LISTS[method])()
    request.CopyFrom(LISTS[method])
    setattr(request, field, value)
    with pytest.raises(InvalidRequestError) as caught, typed_errors():
        await getattr(stub, method)(request)
    assert caught.value.field == field


async def test_a_token_serves_the_list_of_its_pool_alone(stub: Stub, shard: RawShard) -> None:
    (other,) = await registered(stub, "pool2")
    for _ in range(2):
        await RawSession.open(stub, shard)
    page = await stub.ListSessions(pool_pb2.ListSessionsRequest(pool_id="pool", page_size=1))
    token = page.next_page_token
    for call in (
        stub.ListPools(pool_pb2.ListPoolsRequest(page_token=token)),
        stub.ListSessions(pool_pb2.ListSessionsRequest(pool_id="pool2", page_token=token)),
    ):
        await refused(call, "INVALID_ARGUMENT", "INVALID_REQUEST", "page_token")
    other.hang_up()


async def test_the_client_reads_all_pages(
    control_server: ControlPlaneServer,
    stub: Stub,
    shard: RawShard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "MAX_PAGE_SIZE", 2)
    others = await registered(stub, "a", "b", "q", "r")
    opened = [(await RawSession.open(stub, shard)).ref.session_id for _ in range(5)]
    async with ControlClient(control_server.address) as client:
        assert await client.list_pools() == ["a", "b", "pool", "q", "r"]
        listed = await client.list_sessions("pool")
    assert [each.session_id for each in listed] == sorted(opened)
    for other in others:
        other.hang_up()


async def test_a_session_is_shown_as_it_is_and_its_lease_is_not_renewed(
    stub: Stub, shard: RawShard
) -> None:
    session = await RawSession.open(stub, shard, namespace="lora-7")
    await session.admit(3, list(range(1, 21)))
    request = pool_pb2.ListSessionsRequest(pool_id="pool")
    [shown] = (await stub.ListSessions(request)).sessions
    assert (shown.session, shown.client_name, shown.namespace) == (session.ref, "test", "lora-7")
    assert (shown.num_sequences, shown.num_held_blocks, shown.num_plans_in_flight) == (1, 3, 1)
    assert shown.last_number == session.number == 1
    sequences = pb.ListSequencesRequest(session=session.ref)
    [state] = SequenceState.all_from_proto((await stub.ListSequences(sequences)).sequences)
    assert (state.sequence_id, state.num_tokens) == (3, 20)
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
    await refused(stub.ListSequences(request), "INVALID_ARGUMENT", "INVALID_REQUEST", "page_token")


def test_a_counter_is_summed_over_its_labels() -> None:
    counters = {
        'hits_total{tier="device"}': 2,
        'hits_total{tier="host"}': 3,
        "hits_total_of_all": 9,
    }
    assert (total_of(counters, "hits_total"), total_of(counters, "hits")) == (5, 0)
