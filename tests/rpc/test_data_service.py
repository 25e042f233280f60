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
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    async with (
        serving(tmp_path, metrics_port=0, max_message_bytes=1 << 20) as (server, side),
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        peer = Peer(server, author_of(server, side), channel)
        yield peer
        await peer.client.close()


async def ask(call: Any, **message: Any) -> pb.ExecuteResponse:
    await call.write(pb.ExecuteRequest(**message))
    answer: pb.ExecuteResponse = await call.read()
    return answer


def wire(tensor: torch.Tensor) -> Tensor:
    return Tensor.from_proto(tensor_to_message(tensor))


def torch_of(tensor: Tensor) -> torch.Tensor:
    return tensor_from_message(tensor.to_proto(), CPU, field="tensor")


def layer_input(
    layer: int, num_tokens: int, *, plan_number: int = 1, **parts: torch.Tensor
) -> pb.LayerInput:
    values = {
        "query": tokens(num_tokens, 4),
        "key": tokens(num_tokens, seed=1),
        "value": tokens(num_tokens, seed=2),
        **parts,
    }
    messages = {name: tensor_to_message(tensor) for name, tensor in values.items()}
    return pb.LayerInput(layer=layer, plan_number=plan_number, **messages)


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


async def test_a_plan_without_spans_is_receipted_at_once(peer: Peer) -> None:
    async with await peer.client.open(peer.author.grant()) as execution:
        await execution.start(peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])]))
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
    stale = peer.author.plan(1, shard_epochs=[4])
    await refused(StaleEpochError, "plan.shard_epochs[0]", plan=stale)
    await refused(PlanOutOfOrderError, "plan.previous", plan=peer.author.plan(2))
    plan = peer.author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 2)])
    assert (await ask(call, plan=plan)).started.num_tokens == 2
    await refused(InvalidRequestError, "layer.layer", layer=layer_input(7, 2))
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


async def test_a_plan_can_be_run_by_unary_calls_alone(peer: Peer) -> None:
    author, client = peer.author, peer.client
    grant = author.grant()
    query, key, value = tokens(9, 4), tokens(9, seed=1), tokens(9, seed=2)
    plan = author.plan(1, changes=[set_blocks(1, [(3, 1), (1, 1)])], spans=[span(1, 0, 9)])
    for _ in range(2):
        response = await client.reshape_and_cache(grant, plan, 1, wire(key), wire(value))
        assert not response.HasField("receipt")
    with pytest.raises(InvalidRequestError):
        await client.paged_attention(grant, plan, 0, wire(query))
    attended = await client.paged_attention(grant, plan, 1, wire(query))
    got = tensor_from_message(attended.output, CPU, field="output")
    torch.testing.assert_close(got, dense_attention(query, key, value), atol=1e-5, rtol=1e-5)
    response = await client.reshape_and_cache(grant, plan, 0, wire(key), wire(value))
    assert author.read_receipt(response.receipt).plan_number == 1
    again = await client.reshape_and_cache(grant, plan, 0, wire(value), wire(key))
    assert again.receipt == response.receipt
    late = await client.paged_attention(grant, plan, 1, wire(query))
    assert late == attended


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
    assert copied.num_blocks == 1
    assert author.read_receipt(copied.receipt).plan_number == 3
    swap = author.plan(
        4,
        changes=[set_blocks(2, [(1, 1)], tier=HOST, replace=True)],
        transfers=[transfer(ref(4), ref(1, 1, HOST))],
    )
    assert (await client.swap_blocks(grant, swap)).num_blocks == 1
    read = await client.read_blocks(grant, 2)
    assert Tensor.from_proto(read.blocks).data == blocks.data
    assert (read.table.tier, blocks_of(read.table)) == (HOST, [(1, 1)])
    executor = peer.server.executor
    assert read.source == pb.BlockSource(
        pool_id=executor.pool_id,
        shard_index=0,
        epoch=executor.epoch,
        layout_fingerprint=executor.layout.fingerprint,
    )


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
                grant=grant, sequence_id=1, num_blocks=2, first_layer=layer, num_layers=1
            )
        )
        request = pb.WriteBlocksRequest(
            grant=grant,
            plan=plan,
            sequence_id=2,
            first_layer=layer,
            num_layers=1,
            blocks=part.blocks,
            source=part.source,
        )
        foreign = pb.WriteBlocksRequest()
        foreign.CopyFrom(request)
        foreign.source.layout_fingerprint = bytes(32)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WriteBlocks(foreign)
        error = from_rpc_error(caught.value)
        assert (type(error), error.field) == (LayoutMismatchError, "source.layout_fingerprint")
        written = await stub.WriteBlocks(request)
        assert written.HasField("receipt") == (layer == 1)
    copied = await client.read_blocks(grant, 2, num_blocks=2)
    assert Tensor.from_proto(copied.blocks).data == blocks.data


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
        await client.read_blocks(grant, 1, num_blocks=2**40)
    assert caught.value.field == "num_blocks"
    peer.server.executor.fence(author.session(1), 1)
    with pytest.raises(SessionExpiredError) as expired:
        await client.read_blocks(grant, 1)
    assert expired.value.field == "grant.session"


async def test_a_message_over_the_limit_is_refused_and_the_next_one_served(peer: Peer) -> None:
    request = pb.ReshapeAndCacheRequest(
        key=types_pb2.Tensor(data=bytes(2 << 20)), grant=peer.author.grant()
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peer.stub.ReshapeAndCache(request)
    assert type(from_rpc_error(caught.value)) is QuotaExceededError
    assert (await peer.client.get_server_info()).shard.epoch == peer.server.executor.epoch


async def test_metrics_tell_what_the_executor_did(peer: Peer) -> None:
    async with await peer.client.open(peer.author.grant()) as execution:
        changes = [set_blocks(1, [(0, 1)])]
        await execution.start(peer.author.plan(1, changes=changes, spans=[span(1, 0, 2)]))
        part = wire(tokens(2))
        for layer in execution.layers:
            await execution.layer(layer, part, part, part)
        with pytest.raises(PlanOutOfOrderError):
            await execution.start(peer.author.plan(9))
    url = f"http://127.0.0.1:{peer.server.metrics_port}/metrics"
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
