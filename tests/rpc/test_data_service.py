"""The data plane's RPCs over a real socket: streams, unary calls, errors, limits."""

from __future__ import annotations

import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from data_plane.server.server import DataPlaneServer
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    LayoutMismatchError,
    PlanOutOfOrderError,
    QuotaExceededError,
    SessionExpiredError,
    StaleEpochError,
)
from kvplane.release import release
from kvplane.tensor import Tensor
from kvplane.wire.error_codec import from_rpc_error, from_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import types_pb2
from tests.helpers.data.data_server import author_of, serving
from tests.helpers.data.plan_author import (
    HOST,
    PlanAuthor,
    blocks_of,
    dense_attention,
    fork,
    int32,
    int64,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)
from tests.helpers.data.unary_client import UnaryClient
from tests.helpers.planning.control_wire import stub_of

CPU = torch.device("cpu")


class Peer:
    """One registered data plane, its plan author and both kinds of client."""

    def __init__(self, server: DataPlaneServer, author: PlanAuthor, channel: Any) -> None:
        self.server = server
        self.author = author
        self.client = UnaryClient(server.address)
        self.stub: Any = stub_of(channel)

    async def opened(self, session_id: int = 1) -> Any:
        """A raw execution stream that is open."""
        call = self.stub.Execute()
        grant = self.author.grant(session_id)
        opened = await ask(call, open=pb.OpenExecution(grant=grant))
        assert opened.opened.layers == [0, 1]
        return call

    def memory(self) -> bytes:
        pools = self.server.executor.pools
        return pools.device_tier.numpy().tobytes() + pools.host_tier.numpy().tobytes()


@pytest.fixture
async def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peer]:
    monkeypatch.setattr("data_plane.server.server.MAX_MESSAGE_BYTES", 1 << 20)
    async with (
        serving(tmp_path) as (server, side),
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        peer = Peer(server, author_of(server, side), channel)
        yield peer
        await peer.client.close()


async def ask(call: Any, **message: Any) -> pb.ExecuteResponse:
    if isinstance(plan := message.get("plan"), types_pb2.SignedPayload):
        message["plan"] = pb.StartPlanRequest(plan=plan)
    await call.write(pb.ExecuteRequest(**message))
    answer: pb.ExecuteResponse = await call.read()
    return answer


def wire(tensor: torch.Tensor) -> Tensor:
    return Tensor.from_proto(tensor_to_message(tensor))


def torch_of(tensor: Tensor) -> torch.Tensor:
    return tensor_from_message(tensor.to_proto(), CPU, field="tensor")


def layer_input(
    layer: int, num_tokens: int, *, plan_number: int = 1, **parts: torch.Tensor
) -> pb.RunLayerRequest:
    values = {
        "query": tokens(num_tokens, 4),
        "key": tokens(num_tokens, seed=1),
        "value": tokens(num_tokens, seed=2),
        **parts,
    }
    messages = {name: tensor_to_message(tensor) for name, tensor in values.items()}
    return pb.RunLayerRequest(layer=layer, plan_number=plan_number, **messages)


def only_attends(layer: pb.RunLayerRequest) -> pb.RunLayerRequest:
    layer.ClearField("key")
    layer.ClearField("value")
    return layer


async def test_its_server_info_says_what_runs_here(peer: Peer) -> None:
    info, executor = await peer.client.get_server_info(), peer.server.executor
    assert (info.version, info.incarnation, info.device) == (release(), 1, "cpu")
    assert info.pool_id == executor.pool_id
    assert info.shard is not None
    assert info.shard.shard == executor.shard
    assert (info.shard.epoch, info.shard.address) == (executor.epoch, peer.server.address)
    assert (info.shard.connected, info.shard.has_file_tier) == (True, False)


async def test_an_execution_runs_a_plan_and_ends_with_its_receipt(
    peer: Peer, shared_memory: bool
) -> None:
    query, key, value = tokens(12, 4), tokens(12, seed=1), tokens(12, seed=2)
    async with (
        UnaryClient(peer.server.address, shared_memory=shared_memory) as client,
        await client.open(peer.author.grant()) as execution,
    ):
        changes = [set_blocks(1, [(5, 1), (2, 1)])]
        await execution.start(peer.author.plan(1, changes=changes, spans=[span(1, 0, 12)]))
        assert execution.num_tokens == 12
        for layer in execution.layers:
            assert not execution.receipts
            output = await execution.layer(layer, wire(query), wire(key), wire(value))
        want = dense_attention(query, key, value)
        torch.testing.assert_close(torch_of(output), want, atol=1e-5, rtol=1e-5)
        assert peer.author.read_receipt(*execution.receipts).plan_number == 1


async def test_a_plan_shown_over_a_second_stream_goes_on_where_it_was(peer: Peer) -> None:
    plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 3)])
    first = await peer.opened()
    assert (await ask(first, plan=plan)).started.num_tokens == 3
    assert (await ask(first, layer=layer_input(0, 3))).output.layer == 0
    first.cancel()
    second = await peer.opened()
    assert not (await ask(second, plan=plan)).started.finished
    output = (await ask(second, layer=layer_input(1, 3))).output
    assert output.layer == 1
    assert peer.author.read_receipt(output.receipt).plan_number == 1
    third = await peer.opened()
    started = (await ask(third, plan=plan)).started
    assert (started.finished, started.receipt) == (True, output.receipt)


async def test_a_stream_answers_errors_and_stays_open(peer: Peer) -> None:
    call = peer.stub.Execute()
    before = peer.memory()

    async def refused(error: type[Exception], field: str, **message: Any) -> None:
        answer = await ask(call, **message)
        assert answer.WhichOneof("message") == "error", answer
        caught = from_wire(answer.error)
        assert (type(caught), caught.field) == (error, field)
        assert peer.memory() == before
        peer.server.executor.check_integrity()

    grant = peer.author.grant()
    await refused(InvalidRequestError, "message")
    await refused(InvalidRequestError, "open", plan=peer.author.plan(1))
    await refused(InvalidRequestError, "layer", layer=layer_input(0, 1))
    forged = types_pb2.SignedPayload(type=grant.type, payload=grant.payload, signature=b"no")
    opening = pb.OpenExecution(grant=forged)
    await refused(BadSignatureError, "grant.signature", open=opening)
    opening = pb.OpenExecution(grant=grant)
    assert (await ask(call, open=opening)).opened.layers == [0, 1]
    await refused(InvalidRequestError, "layer", layer=layer_input(0, 1))
    granted = pb.StartPlanRequest(grant=grant, plan=peer.author.plan(1))
    await refused(InvalidRequestError, "plan.grant", plan=granted)
    stale = peer.author.plan(1, shard_epochs=[4])
    await refused(StaleEpochError, "plan.shard_epochs[0]", plan=stale)
    await refused(PlanOutOfOrderError, "plan.previous", plan=peer.author.plan(2))
    plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 2)])
    assert (await ask(call, plan=plan)).started.num_tokens == 2
    await refused(InvalidRequestError, "layer.layer", layer=layer_input(7, 2))
    for name, payload in (("grant", grant), ("plan", plan)):
        presented = layer_input(0, 2)
        getattr(presented, name).CopyFrom(payload)
        await refused(InvalidRequestError, f"layer.{name}", layer=presented)
    await refused(InvalidRequestError, "layer.layer", layer=only_attends(layer_input(0, 2)))
    await refused(InvalidRequestError, "layer.key", layer=pb.RunLayerRequest(plan_number=1))
    keyless = layer_input(0, 2)
    keyless.ClearField("key")
    await refused(InvalidRequestError, "layer.key", layer=keyless)
    await refused(InvalidRequestError, "layer.key", layer=layer_input(0, 2, key=tokens(3)))
    await refused(InvalidRequestError, "layer.query", layer=layer_input(0, 2, query=tokens(2, 3)))
    short = layer_input(0, 2)
    short.value.data = short.value.data[:-1]
    await refused(InvalidRequestError, "layer.value.data", layer=short)
    negative = layer_input(0, 2)
    negative.key.shape[0] = -2
    await refused(InvalidRequestError, "layer.key.shape", layer=negative)
    huge = layer_input(0, 2)
    huge.key.shape[:] = [0, 2**62, 2**62]
    huge.key.data = b""
    await refused(InvalidRequestError, "layer.key.shape", layer=huge)
    shared = layer_input(0, 2)
    shared.key.memory.region_id = 1
    await refused(InvalidRequestError, "layer.key.memory", layer=shared)
    unknown = layer_input(0, 2)
    unknown.options.MergeFromString(b"\x98\x06\x01")  # field 99, which may come one day
    await refused(InvalidRequestError, "layer.options", layer=unknown)
    untyped = layer_input(0, 2)
    untyped.query.dtype = 9
    await refused(InvalidRequestError, "layer.query.dtype", layer=untyped)
    assert (await ask(call, layer=layer_input(0, 2))).output.layer == 0
    last = (await ask(call, layer=layer_input(1, 2))).output
    assert peer.author.read_receipt(last.receipt).plan_number == 1


async def test_bytes_that_are_no_request_are_answered_on_the_stream(peer: Peer) -> None:
    async with grpc.aio.insecure_channel(peer.server.address) as channel:
        call = channel.stream_stream("/kvplane.v1.ExecutionService/Execute")()
        await call.write(b"\xff\xff\xff")
        answer = pb.ExecuteResponse.FromString(await call.read())
        assert answer.error.reason == "INVALID_REQUEST"
        request = pb.ExecuteRequest(open=pb.OpenExecution(grant=peer.author.grant()))
        await call.write(request.SerializeToString())
        assert pb.ExecuteResponse.FromString(await call.read()).HasField("opened")
        call.cancel()


async def test_a_layer_without_a_query_answers_an_empty_output(peer: Peer) -> None:
    call = await peer.opened()
    plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 2)])
    await ask(call, plan=plan)
    request = layer_input(0, 2)
    request.ClearField("query")
    answer = await ask(call, layer=request)
    assert answer.output.layer == 0
    assert answer.output.output.data == b""


async def test_a_layer_without_a_key_attends_in_one_that_was_written(peer: Peer) -> None:
    call = await peer.opened()
    plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 2)])
    await ask(call, plan=plan)
    written = await ask(call, layer=layer_input(0, 2))
    before = peer.memory()
    assert await ask(call, layer=only_attends(layer_input(0, 2))) == written
    answer = await ask(call, layer=only_attends(layer_input(1, 2)))
    assert (answer.error.reason, answer.error.field) == ("INVALID_REQUEST", "layer.layer")
    assert peer.memory() == before
    last = await ask(call, layer=layer_input(1, 2))
    again = await ask(call, layer=only_attends(layer_input(1, 2)))
    assert again == last
    assert again.output.HasField("receipt")


@pytest.mark.parametrize(
    ("method", "field"), [("ReshapeAndCache", "key"), ("PagedAttention", "query")]
)
async def test_half_a_layer_has_its_own_tensor(peer: Peer, method: str, field: str) -> None:
    plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 2)])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(peer.stub, method)(pb.RunLayerRequest(grant=peer.author.grant(), plan=plan))
    error = from_rpc_error(caught.value)
    assert (type(error), error.field) == (InvalidRequestError, field)
    assert peer.server.executor.num_sequences == 0, "the plan was not started"


UNARY = {
    "ReshapeAndCache": ("query", "options", "output"),
    "PagedAttention": ("key", "value"),
}


@pytest.mark.parametrize(("method", "field"), [(m, f) for m in UNARY for f in UNARY[m]])
async def test_half_a_layer_has_nothing_of_the_other_half(
    peer: Peer, method: str, field: str
) -> None:
    plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 2)])
    request = layer_input(0, 2)
    request.grant.CopyFrom(peer.author.grant())
    request.plan.CopyFrom(plan)
    request.options.scale = 0.5
    request.output.offset_bytes = 64
    for other in {"query", "key", "value", "options", "output"} & {*UNARY[method]} - {field}:
        request.ClearField(other)
    before = peer.memory()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(peer.stub, method)(request)
    error = from_rpc_error(caught.value)
    assert (type(error), error.field) == (InvalidRequestError, field)
    assert (peer.memory(), peer.server.executor.num_sequences) == (before, 0)


async def test_a_single_call_may_name_its_plan_and_its_pass(peer: Peer) -> None:
    grant = peer.author.grant()
    plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 2)])
    started = await peer.stub.CopyBlocks(pb.StartPlanRequest(grant=grant, plan=plan, pass_index=0))
    assert (started.plan_number, started.num_tokens, started.finished) == (1, 1, False)
    for named, field in (
        ({"plan_number": 2}, "plan_number"),
        ({"plan_number": 1}, "pass_index"),
        ({"pass_index": 1}, "pass_index"),
        ({"pass_index": 0}, ""),
        ({"plan_number": 1, "pass_index": 0}, ""),
    ):
        request = layer_input(0, 1)
        for name in ("query", "plan_number"):
            request.ClearField(name)
        request.MergeFrom(pb.RunLayerRequest(grant=grant, plan=plan, **named))
        try:
            assert (await peer.stub.ReshapeAndCache(request)).layer == 0
            assert not field
        except grpc.aio.AioRpcError as refusal:
            error = from_rpc_error(refusal)
            assert (type(error), error.field) == (PlanOutOfOrderError, field)


async def test_a_plan_can_be_run_by_unary_calls_alone(peer: Peer) -> None:
    author, client = peer.author, peer.client
    grant = author.grant()
    query, key, value = tokens(9, 4), tokens(9, seed=1), tokens(9, seed=2)
    plan = author.plan(1, changes=[set_blocks(1, [(3, 1), (1, 1)])], spans=[span(1, 0, 9)])
    for _ in range(2):
        response = await client.reshape_and_cache(grant, plan, 0, wire(key), wire(value))
        assert not response.HasField("receipt")
    with pytest.raises(InvalidRequestError) as caught:
        await client.paged_attention(grant, plan, 1, wire(query))
    assert caught.value.field == "layer"
    attended = await client.paged_attention(grant, plan, 0, wire(query))
    got = tensor_from_message(attended.output, CPU, field="output")
    torch.testing.assert_close(got, dense_attention(query, key, value), atol=1e-5, rtol=1e-5)
    response = await client.reshape_and_cache(grant, plan, 1, wire(key), wire(value))
    assert author.read_receipt(response.receipt).plan_number == 1
    again = await client.reshape_and_cache(grant, plan, 1, wire(value), wire(key))
    assert again.receipt == response.receipt
    late = await client.paged_attention(grant, plan, 0, wire(query))
    assert (late.output, late.receipt) == (attended.output, response.receipt)


async def test_copies_and_swaps_are_calls_of_their_own(peer: Peer) -> None:
    author, client = peer.author, peer.client
    grant = author.grant()
    await client.copy_blocks(grant, author.plan(1, changes=[set_blocks(1, [(0, 1)])]))
    blocks = wire(torch.randn(2, 1, 2, 2, 8, 16))
    write = author.plan(2, spans=[span(1, 0, 8)])
    written = await client.write_blocks(grant, write, 1, blocks)
    assert author.read_receipt(written.receipt).plan_number == 2
    copy = author.plan(
        3,
        changes=[fork(2, 1, 0), set_blocks(2, [(4, 1)])],
        transfers=[transfer(ref(0), ref(4))],
    )
    with pytest.raises(InvalidRequestError) as caught:
        await client.swap_blocks(grant, copy)
    assert caught.value.field == "plan.transfers.destination_tiers[0]"
    copied = await client.copy_blocks(grant, copy)
    assert (copied.num_copied_blocks, copied.num_swapped_blocks) == (1, 0)
    assert author.read_receipt(copied.receipt).plan_number == 3
    swap = author.plan(
        4,
        changes=[set_blocks(2, [(1, 1)], tier=HOST, replace=True)],
        transfers=[transfer(ref(4), ref(1, 1, HOST))],
    )
    swapped = await client.swap_blocks(grant, swap)
    assert (swapped.num_copied_blocks, swapped.num_swapped_blocks) == (0, 1)
    read = await client.read_blocks(grant, 2)
    assert Tensor.from_proto(read.blocks).data == blocks.data
    assert (read.table.tier, blocks_of(read.table)) == (HOST, [(1, 1)])
    assert read.layout_fingerprint == peer.server.executor.layout.fingerprint


async def test_blocks_travel_in_parts_of_layers_and_say_where_from(peer: Peer) -> None:
    author, client, stub = peer.author, peer.client, peer.stub
    grant = author.grant()
    blocks = wire(torch.randn(2, 2, 2, 2, 8, 16))
    fill = author.plan(1, changes=[set_blocks(1, [(0, 1), (1, 1)])], spans=[span(1, 0, 16)])
    await client.write_blocks(grant, fill, 1, blocks)
    plan = author.plan(2, changes=[set_blocks(2, [(4, 1), (5, 1)])], spans=[span(2, 0, 16)])
    for layer in (0, 1):
        part = await stub.ReadBlocks(
            pb.ReadBlocksRequest(
                grant=grant, sequence_id=1, entries=int32(0, 1), first_layer=layer, num_layers=1
            )
        )
        request = pb.WriteBlocksRequest(
            grant=grant,
            plan=plan,
            sequence_ids=int64(2, 2),
            entries=int32(0, 1),
            first_layer=layer,
            num_layers=1,
            blocks=part.blocks,
            layout_fingerprint=part.layout_fingerprint,
        )
        foreign = pb.WriteBlocksRequest()
        foreign.CopyFrom(request)
        foreign.layout_fingerprint = bytes(32)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WriteBlocks(foreign)
        error = from_rpc_error(caught.value)
        assert (type(error), error.field) == (LayoutMismatchError, "layout_fingerprint")
        written = await stub.WriteBlocks(request)
        assert written.HasField("receipt") == (layer == 1)
    copied = await client.read_blocks(grant, 2, num_blocks=2)
    assert Tensor.from_proto(copied.blocks).data == blocks.data


async def filled(peer: Peer) -> bytes:
    """Fill two blocks of sequence 1; return them as they are read."""
    changes = [set_blocks(1, [(0, 1), (1, 1)])]
    fill = peer.author.plan(1, changes=changes, spans=[span(1, 0, 16)])
    blocks = wire(torch.randn(2, 2, 2, 2, 8, 16))
    written = await peer.client.write_blocks(peer.author.grant(), fill, 1, blocks)
    assert written.HasField("receipt")
    return bytes(blocks.data)


async def test_any_entries_of_a_table_are_read_in_any_order(peer: Peer) -> None:
    whole = torch.frombuffer(bytearray(await filled(peer)), dtype=torch.float32)
    blocks = whole.view(2, 2, 2, 2, 8, 16)
    for entries in ((1,), (1, 0), (0, 1, 0)):
        request = pb.ReadBlocksRequest(
            grant=peer.author.grant(), sequence_id=1, entries=int32(*entries)
        )
        read = await peer.stub.ReadBlocks(request)
        assert torch.equal(torch_of(Tensor.from_proto(read.blocks)), blocks[:, list(entries)])
        assert blocks_of(read.table) == [(entry, 1) for entry in entries]
        assert read.num_bytes == b""


PAYLOAD = types_pb2.SignedPayload(type="kvplane.plane.v1.PinGrant")
RANGE = types_pb2.MemoryRange()
NOT_SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "entries": ("ReadBlocks", {"entries": b""}),
    "entries[1]": ("ReadBlocks", {"entries": int32(0, 2)}),
    "pin_grant": ("ReadBlocks", {"pin_grant": PAYLOAD}),
    "output": ("ReadBlocks", {"output": RANGE}),
    "keys": ("ReadBlocks", {"keys": [b"key"]}),
    "entries of a write": ("WriteBlocks", {"entries": b"", "sequence_ids": b""}),
    "entries[1] of a write": ("WriteBlocks", {"entries": int32(0, 2)}),
    "entries[1] of a write, twice": ("WriteBlocks", {"entries": int32(1, 1)}),
    "sequence_ids": ("WriteBlocks", {"sequence_ids": int64(2)}),
    "sequence_ids[1]": ("WriteBlocks", {"sequence_ids": int64(2, 1)}),
    "blocks.shape": ("WriteBlocks", {"entries": int32(0), "sequence_ids": int64(2)}),
    "num_bytes": ("WriteBlocks", {"num_bytes": int32(4, 4)}),
    "keys of a write": ("WriteBlocks", {"keys": [b"key"]}),
}


@pytest.mark.parametrize("name", NOT_SERVED)
async def test_blocks_that_are_not_served_are_refused_by_name(peer: Peer, name: str) -> None:
    method, changed = NOT_SERVED[name]
    data = await filled(peer)
    request: Any = pb.ReadBlocksRequest(sequence_id=1, entries=int32(0, 1))
    if method == "WriteBlocks":
        changes = [set_blocks(2, [(4, 1), (5, 1)])]
        request = pb.WriteBlocksRequest(
            plan=peer.author.plan(2, changes=changes, spans=[span(2, 0, 16)]),
            sequence_ids=int64(2, 2),
            entries=int32(0, 1),
            blocks=Tensor("float32", (2, 2, 2, 2, 8, 16), data).to_proto(),
        )
    request.grant.CopyFrom(peer.author.grant())
    for field, value in changed.items():
        request.ClearField(field)
        request.MergeFrom(type(request)(**{field: value}))
    before, num_sequences = peer.memory(), peer.server.executor.num_sequences
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(peer.stub, method)(request)
    error = from_rpc_error(caught.value)
    assert (type(error), error.field) == (InvalidRequestError, name.partition(" ")[0])
    assert peer.memory() == before
    assert peer.server.executor.num_sequences == num_sequences


async def test_a_layer_of_a_plan_that_another_stream_has_finished_is_answered(peer: Peer) -> None:
    plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 3)])
    first, second = await peer.opened(), await peer.opened()
    await ask(first, plan=plan)
    await ask(first, layer=layer_input(0, 3))
    assert not (await ask(second, plan=plan)).started.finished
    output = await ask(first, layer=layer_input(1, 3))
    before = peer.memory()
    other = layer_input(1, 3, key=tokens(3, seed=8), value=tokens(3, seed=9))
    assert await ask(second, layer=other) == output
    assert peer.memory() == before


async def test_unary_calls_fail_with_the_error_and_its_field(peer: Peer) -> None:
    author, client = peer.author, peer.client
    grant = author.grant()
    with pytest.raises(BadSignatureError):
        await client.read_blocks(types_pb2.SignedPayload(type=grant.type), 1)
    with pytest.raises(InvalidRequestError) as caught:
        await client.read_blocks(grant, 1, group=3)
    assert caught.value.field == "group"
    with pytest.raises(InvalidRequestError) as caught:
        await client.read_blocks(grant, 1, num_blocks=2**16)
    assert caught.value.field == "entries"
    for first_block in (2**31, -(2**31) - 1):
        with pytest.raises(InvalidRequestError) as caught:
            await client.read_blocks(grant, 1, first_block=first_block)
        assert caught.value.field == "entries"
    peer.server.executor.fence(author.session(1), 1)
    with pytest.raises(SessionExpiredError) as expired:
        await client.read_blocks(grant, 1)
    assert expired.value.field == "grant.session"


async def test_a_message_over_the_limit_is_refused_and_the_next_one_served(peer: Peer) -> None:
    request = pb.RunLayerRequest(
        key=types_pb2.Tensor(data=bytes(2 << 20)), grant=peer.author.grant()
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peer.stub.ReshapeAndCache(request)
    assert type(from_rpc_error(caught.value)) is QuotaExceededError
    assert (await peer.client.get_server_info()).shard.epoch == peer.server.executor.epoch


async def test_metrics_tell_what_the_executor_did(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, metrics_port=0) as (server, side),
        UnaryClient(server.address) as client,
    ):
        author = author_of(server, side)
        async with await client.open(author.grant()) as execution:
            changes = [set_blocks(1, [(0, 1)])]
            await execution.start(author.plan(1, changes=changes, spans=[span(1, 0, 2)]))
            part = wire(tokens(2))
            for layer in execution.layers:
                await execution.layer(layer, part, part, part)
            with pytest.raises(PlanOutOfOrderError):
                await execution.start(author.plan(9))
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
    for line in (
        'kvplane_written_tokens_total{pool="pool"} 4.0',
        'kvplane_attention_tokens_total{pool="pool"} 4.0',
        'kvplane_plans_run_total{pool="pool"} 1.0',
        'kvplane_cleared_blocks_total{pool="pool"} 0.0',
        'kvplane_block_tables{pool="pool"} 1.0',
        'kvplane_registered{pool="pool"} 1.0',
        'kvplane_pool_blocks{group="full",pool="pool",tier="host"} 4.0',
        'kvplane_rejections_total{pool="pool",reason="PLAN_OUT_OF_ORDER"} 1.0',
        'kvplane_command_duration_seconds_count{command="layer",pool="pool"} 2.0',
    ):
        assert f"\n{line}\n" in text, text


async def test_stopping_ends_idle_streams_at_once(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, grace_s=30.0) as (server, side),
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        peer = Peer(server, author_of(server, side), channel)
        call = await peer.opened()
        await server.stop()
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
        await peer.client.close()
